#!/usr/bin/env bash
# Packs the wheel and the GPU checks into dist/gpu-check/, a folder that runs on a machine with a GPU and no network.
# With --here it is run on this machine as well.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=dist/gpu-check
scripts/wheel.sh
rm -rf "$folder" && mkdir -p "$folder"
cp dist/evenstep-*.whl tests/gpu/*.py examples/char_gpt.py "$folder/"
echo "copy $folder to a machine with a GPU and a torch that has CUDA, and run there: python run.py"
if [ "${1:-}" = --here ]; then
  exec "${EVENSTEP_VENV:-$PWD/.venv}/bin/python" "$folder/run.py"
fi
