#!/usr/bin/env bash
# unpack.sh SUITE FOLDER PACKAGE...: downloads Debian packages of another suite, with everything they depend on, from
# the mirror this machine already uses, and unpacks them into FOLDER. Nothing is installed; no root is needed.
# FOLDER appears only when it is whole. SUITE may be a comma list: the first one that has the packages is taken.
set -euo pipefail
suites=$1 folder=$(realpath -m "$2")
shift 2

mirror=$(sed -nE 's/^URIs:[[:space:]]*([^[:space:]]+\/debian)\/?([[:space:]].*)?$/\1/p; s/^deb[[:space:]]+(\[[^]]*\][[:space:]]+)?([^[:space:]]+\/debian)\/?[[:space:]].*/\2/p' \
    /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | sort -u | head -1 || true)
mirror=${mirror:-http://deb.debian.org/debian}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "$(dirname "$folder")/.unpack.XXXXXX")
trap 'rm -rf "$work"' EXIT

for suite in ${suites//,/ }; do
    rm -rf "$work/apt"
    mkdir -p "$work"/apt/{state/lists/partial,cache/archives/partial,etc}
    : >"$work/apt/status"  # as if nothing were installed: the C library and its loader come too
    echo "deb [signed-by=$keyring] $mirror $suite main" >"$work/apt/etc/sources.list"
    apt=(apt-get -qq -o "Dir::State=$work/apt/state" -o "Dir::State::status=$work/apt/status"
        -o "Dir::Cache=$work/apt/cache" -o "Dir::Etc::sourcelist=$work/apt/etc/sources.list" -o Dir::Etc::sourceparts=/dev/null
        -o Dir::Etc::preferencesparts=/dev/null -o "APT::Sandbox::User=$(id -un)" -o Debug::NoLocking=1)
    if ! "${apt[@]}" update >"$work/log" 2>&1 ||
        ! "${apt[@]}" -y --no-install-recommends --download-only install "$@" >>"$work/log" 2>&1; then
        echo "unpack: $* from $suite: $(grep -E '^(E|W):' "$work/log" | head -3 | tr '\n' ' ')" >&2
        continue
    fi
    mkdir -p "$work/tree"
    for package in "$work"/apt/cache/archives/*.deb; do
        dpkg-deb -x "$package" "$work/tree"
    done
    rm -rf "$folder"
    mv "$work/tree" "$folder"
    exit 0
done
exit 1
