#!/usr/bin/env bash
# Collectives, messages and a checkpoint of more than 4 GiB, checked byte by byte; takes up to 18 GB of memory. See large.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
PATH="${EVENSTEP_VENV:-$PWD/.venv}/bin:$PATH" exec "${EVENSTEP_VENV:-$PWD/.venv}/bin/python" scripts/large.py "$@"
