#!/usr/bin/env bash
# Collectives of more than 4 GiB, checked byte by byte; takes 18 GB of memory. See large.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
exec "${EVENSTEP_VENV:-$PWD/.venv}/bin/python" scripts/large.py
