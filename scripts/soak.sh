#!/usr/bin/env bash
# Jobs whose ranks and agents are killed at random, for MINUTES (default 60); see soak.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
exec "${EVENSTEP_VENV:-$PWD/.venv}/bin/python" scripts/soak.py --minutes "${1:-60}"
