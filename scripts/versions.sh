#!/usr/bin/env bash
# The Python tests against the wheel with another torch than the pinned one, or another Python, in an environment of their own under build/versions.
# usage: scripts/versions.sh [--python PROGRAM] TORCH [PYTEST-WORD…]; TORCH as pip takes it: torch==2.14.1. Without --python: .venv's.
# The wheel is built anew, by .venv's Python (EVENSTEP_WHEEL=FILE: that one): one is for all. What else the tests need is pinned where this Python can
# have it, elsewhere the newest that it can have. Nothing is required (EVENSTEP_TEST_REQUIRE): what is missing is skipped.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  echo "usage: scripts/versions.sh [--python PROGRAM] torch==VERSION [PYTEST-WORD…]" >&2
  exit 2
}
python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
if [ "${1:-}" = --python ]; then
  [ $# -ge 2 ] || usage
  python="$2"
  shift 2
fi
torch="${1:-}"
[[ "$torch" =~ ^torch([=\<\>~!].*)?$ ]] || usage
shift

version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
venv="$PWD/build/versions/python-$version-${torch//[^A-Za-z0-9.]/-}"
wheel="${EVENSTEP_WHEEL:-}"
if [ -z "$wheel" ]; then
  scripts/wheel.sh
  wheel="$(echo dist/evenstep-*.whl)"
fi

if ! [ -e "$venv/evenstep.stamp" ]; then
  echo "Making an environment with Python $version and $torch in $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check)
  needs=(numpy pytest pytest-timeout hypothesis safetensors)
  grep -v '^torch==' constraints.txt > "$venv/constraints.txt"
  "${pip[@]}" "$torch"
  "${pip[@]}" --constraint "$venv/constraints.txt" "${needs[@]}" 2> "$venv/pinned.log" || "${pip[@]}" "${needs[@]}"
  touch "$venv/evenstep.stamp"
fi
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall "$wheel"
"$venv/bin/python" - << 'END'
import platform

import numpy, torch, evenstep

print(f"Python {platform.python_version()}, torch {torch.__version__}, numpy {numpy.__version__}, evenstep {evenstep.__version__}", flush=True)
END
exec scripts/python_tests.sh "$venv/bin" "$@"
