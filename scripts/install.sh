#!/usr/bin/env bash
# Builds Evenstep and installs it into .venv, unless what is there was built from these very files.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
mkdir -p build
state="$(find CMakeLists.txt pyproject.toml cmake cli include python src ui -type f ! -name '*.so' ! -path '*__pycache__*' -print0 |
  sort -z | xargs -0 cksum | cksum) $("$bin/python" -c 'import sys; print(sys.version_info[:2])')"
stamp="${bin%/bin}/evenstep-installed.stamp"
if [ "$(cat "$stamp" 2> /dev/null)" != "$state" ] || [ ! -x "$bin/evenstep" ]; then
  echo "Building Evenstep and installing it into ${bin%/bin} (about a minute)"
  if ! PATH="$bin:$PATH" "$bin/python" -m pip install . --no-deps --no-build-isolation --force-reinstall --disable-pip-version-check \
    --config-settings=build-dir=build/wheel > build/install.log 2>&1; then
    cat build/install.log >&2
    exit 1
  fi
  echo "$state" > "$stamp"
fi
