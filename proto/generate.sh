#!/usr/bin/env bash
# Makes bmoe_proto/v1 from telemetry.proto with generators no newer than Termux's runtimes.
set -euo pipefail
cd "$(dirname "$0")/.."
here=.cache/proto-venv
if [ ! -x "$here/bin/python" ]; then
    .venv/bin/python -m venv "$here"
    "$here/bin/python" -m pip install --quiet --upgrade 'pip>=25.1'
    "$here/bin/python" -m pip install --quiet --group proto
fi
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
mkdir -p "$out/src/bmoe_proto/v1"
cp proto/bmoe/telemetry/v1/telemetry.proto "$out/src/bmoe_proto/v1/"
PATH="$PWD/$here/bin:$PATH" "$here/bin/python" -m grpc_tools.protoc -I "$out/src" --python_out=proto --grpc_python_out=proto \
    --mypy_out=proto --mypy_grpc_out=proto "$out/src/bmoe_proto/v1/telemetry.proto"
printf '"""Generated from telemetry.proto by proto/generate.sh; not edited."""\n' > proto/bmoe_proto/v1/__init__.py
