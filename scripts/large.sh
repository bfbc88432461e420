#!/usr/bin/env bash
# Collectives, gradients, states of optimizers and checkpoints of more than 4 GiB, checked byte by byte; takes up to 17 GB of memory. See large.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
PATH="${EVENSTEP_VENV:-$PWD/.venv}/bin:$PATH" exec "${EVENSTEP_VENV:-$PWD/.venv}/bin/python" scripts/large.py "$@"
