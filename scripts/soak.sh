#!/usr/bin/env bash
# Jobs under faults of all kinds, then ranks that share too few cores; see soak.py, which has the arguments. What it prints is kept in
# docs/results/. Where mounting is permitted the runs have a small disk of their own, so that it can be filled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
result="docs/results/soak-$(date -u +%F).txt"
disk="$(mktemp -d)"
own=()
if [ "$(id -u)" = 0 ] && mount -t tmpfs -o size=256m tmpfs "$disk" 2> /dev/null; then
  trap 'umount -l "$disk"; rmdir "$disk"' EXIT
  own=(--runs-dir "$disk")
else
  rmdir "$disk"
fi
"$python" scripts/soak.py "${own[@]}" "$@" | tee "$result"
