#!/usr/bin/env bash
# `make demo`: installs what is missing, builds Evenstep into .venv, trains, reports. Words after it go to demo.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/bootstrap.sh demo
scripts/install.sh
bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
PATH="$bin:$PATH" exec "$bin/python" scripts/demo.py "$@"
