#!/usr/bin/env bash
# Builds the wheel into dist/ and puts the system libraries that the program needs inside it (auditwheel).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
raw=build/wheel-raw
rm -rf "$raw" && mkdir -p "$raw" dist
if ! PATH="$bin:$PATH" "$bin/python" -m pip wheel . --no-deps --no-build-isolation --disable-pip-version-check \
  --config-settings=build-dir=build/wheel --wheel-dir "$raw" > build/wheel.log 2>&1; then
  cat build/wheel.log >&2
  exit 1
fi
rm -f dist/evenstep-*.whl
if ! PATH="$bin:$PATH" "$bin/auditwheel" repair --wheel-dir dist "$raw"/evenstep-*.whl > build/auditwheel.log 2>&1; then
  cat build/auditwheel.log >&2
  exit 1
fi
ls dist/evenstep-*.whl
