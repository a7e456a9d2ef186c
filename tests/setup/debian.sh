#!/usr/bin/env bash
# Puts on a Debian machine what make needs beyond Python. One argument:
#   venv        python3-venv
#   services    adb, a real adbd (unpacked beside the repository, not installed), PostgreSQL, iproute2, the shells of phones
#   java        a Java runtime for Spark
#   `shellcheck`  installs it, then runs it over every *.sh here
# Without root or elsewhere than on Debian it says what is missing and why, and ends with 0: the tests that need
# it then skip with their own reason.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cache=$root/.cache

say() { echo "setup: $*" >&2; }

updated=
install() {  # packages
    local wanted=() name
    for name in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Abbrev}' "$name" 2>/dev/null) == ii* ]] || wanted+=("$name")
    done
    ((${#wanted[@]})) || return 0
    if [[ $(id -u) != 0 ]]; then
        say "not root: ${wanted[*]} cannot be installed; what needs it is skipped"
        return 0
    fi
    if [[ -z $updated ]]; then
        apt-get -qq -o DPkg::Lock::Timeout=120 update >&2 || say "apt-get update failed; trying with the lists there are"
        updated=1
    fi
    say "installing ${wanted[*]}"
    DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=300 \
        install "${wanted[@]}" >/dev/null || say "installing ${wanted[*]} failed; what needs it is skipped"
}

if [[ ! -r /etc/debian_version ]] || ! command -v apt-get >/dev/null; then
    say "not Debian: nothing installed; what needs adb, adbd or PostgreSQL is skipped unless it is there"
    if [[ ${1:-} != shellcheck ]] || ! command -v shellcheck >/dev/null; then exit 0; fi
fi

case ${1:-} in
venv)
    install python3-venv
    ;;
services)
    mkdir -p "$cache"
    # two makes at once must not unpack into each other
    exec 9>"$cache/.setup.lock"
    flock 9
    install adb iproute2 postgresql mksh busybox toybox
    # PostgreSQL's package starts a cluster of its own on some machines; the tests never use it
    if [[ ! -x $cache/debian/adbd.sh ]]; then
        "$root/tests/setup/unpack.sh" trixie "$cache/debian/tree" adbd ||
            { say "adbd could not be had; tests with real phones are skipped"; exit 0; }
        cat >"$cache/debian/adbd.sh" <<'END'
#!/bin/sh
# Debian 13's adbd through the loader it was unpacked with.
tree=$(cd "$(dirname "$0")/tree" && pwd)
for loader in "$tree"/usr/lib/*/ld-linux*.so.* "$tree"/lib/ld-linux*.so.* "$tree"/lib64/ld-linux*.so.*; do
    [ -e "$loader" ] && break
done
libraries=$(find "$tree/usr/lib" "$tree/lib" -name '*.so*' -printf '%h\n' 2>/dev/null | sort -u | tr '\n' ':')
exec "$loader" --library-path "$libraries" "$tree/usr/lib/android-sdk/platform-tools/adbd" "$@"
END
        chmod +x "$cache/debian/adbd.sh"
    fi
    ;;
java)
    command -v java >/dev/null || install default-jre-headless
    ;;
shellcheck)
    command -v shellcheck >/dev/null || install shellcheck
    if ! command -v shellcheck >/dev/null; then
        say "shellcheck is not here: skipped"
        exit 0
    fi
    cd "$root"
    mapfile -t files < <(git ls-files '*.sh' '.ci/run'; git ls-files -s | awk '$1 == 100755 {print $4}' |
        while read -r file; do head -c 40 "$file" | grep -qE '^#!.*\b(ba)?sh' && echo "$file"; done)
    mapfile -t files < <(printf '%s\n' "${files[@]}" | sort -u)
    shellcheck "${files[@]}"
    ;;
*)
    sed -n 's/^#   //p' "$0" >&2
    exit 2
    ;;
esac
