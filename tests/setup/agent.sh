#!/usr/bin/env bash
# Runs what belongs to the phone on the newest CPython that can be had here, with pure-Python protobuf and nothing
# installed but the base install and pytest: as near to Termux as this machine gets. Everything is kept in .cache, so
# only the first run needs the network. Further arguments go to pytest (default: -m 'agent and not slow').
#   agent.sh --python   only makes the environment and prints its interpreter
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
cache=$root/.cache
tree=$cache/python/tree
venv=$cache/agent-venv
mkdir -p "$cache/python"
exec 9>"$cache/.agent.lock"
flock 9

say() { echo "agent: $*" >&2; }

# Sets `base` (what runs Python) and `home` (where its interpreter lies) to the best there is.
find_python() {
    if [[ ! -x $tree/usr/bin/python3.14 ]] && command -v apt-get dpkg-deb >/dev/null; then
        "$root/tests/setup/unpack.sh" forky,sid "$tree" python3.14 libstdc++6 2>"$cache/python/log" ||
            say "CPython 3.14 of a newer Debian could not be had: $(tail -1 "$cache/python/log")"
    fi
    base='' home=''
    if [[ -x $tree/usr/bin/python3.14 ]]; then
        local loader libraries
        loader=$(find "$tree/usr" -name 'ld-linux*.so.*' | sort | head -1)
        libraries=$(find "$tree/usr/lib" -name 'lib*.so*' -printf '%h\n' | sort -u | grep -v /python3 | tr '\n' ':')
        base="exec $loader --library-path $libraries --argv0 \"\$0\" $tree/usr/bin/python3.14"
        home=$tree/usr/bin
        return
    fi
    local candidate version found
    for version in 3.14 3.13; do
        for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python3; do
            found=$("$candidate" -c 'import sys; print(sys.executable)' 2>/dev/null) || continue
            base="exec $found" home=$(dirname "$found")
            return
        done
    done
    say "no CPython newer than the host's can be had here: running on the host's"
    found=$("$root/.venv/bin/python" -c 'import sys; print(sys._base_executable)')
    base="exec $found" home=$(dirname "$found")
}

make_venv() {
    local version
    mkdir -p "$venv/bin"
    if [[ $base == *--argv0* ]]; then
        # a wrapper where the interpreter would be: it needs the loader it was unpacked with
        printf '#!/bin/sh\n%s "$@"\n' "$base" >"$venv/bin/python"
        chmod +x "$venv/bin/python"
    else
        ln -sf "${base#exec }" "$venv/bin/python"
    fi
    ln -sf python "$venv/bin/python3"
    # first: without it the unpacked interpreter does not find its own library
    printf 'home = %s\ninclude-system-site-packages = false\n' "$home" >"$venv/pyvenv.cfg"
    version=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    mkdir -p "$venv/lib/python$version/site-packages"
    "$root/.venv/bin/python" -m pip --quiet --python "$venv/bin/python" install \
        --editable "$root" 'pytest>=8.3' 'hypothesis>=6.100' 'pytest-timeout>=2.3' 'pytest-rerunfailures>=15'
}

stamp=$(sha256sum "$root/pyproject.toml" "$0" | sha256sum | cut -c1-32)
if [[ $(cat "$venv/.ready" 2>/dev/null) != "$stamp" ]]; then
    find_python
    if make_venv; then
        echo "$stamp" >"$venv/.ready"
    elif [[ -s $venv/.ready ]]; then
        say "could not be brought up to date (is the network away?): using it as it is"
    else
        say "its environment could not be made; running on the host's Python"
        venv=$root/.venv
    fi
fi
flock -u 9

if [[ ${1:-} == --python ]]; then
    echo "$venv/bin/python"
    exit 0
fi
(($#)) || set -- -m 'agent and not slow'
cd "$root"
say "$("$venv/bin/python" -c 'import sys, google.protobuf as p; print("CPython", sys.version.split()[0], "protobuf", p.__version__)'), pure-Python protobuf"
export PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python
exec "$venv/bin/python" -m pytest "$@"
