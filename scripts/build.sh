#!/usr/bin/env bash
# Builds one flavour into build/FLAVOUR with warnings as errors: gcc (with the flags of the wheel), clang (what is no test: address and thread
# compile the tests by it), address (ASan+UBSan, and the fuzz targets), thread (TSan).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

flavour="${1:?usage: scripts/build.sh gcc|clang|address|thread}"
python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
options=(-DEVENSTEP_WERROR=ON)
case "$flavour" in
  gcc) options+=(-DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=Release -DEVENSTEP_TESTS=ON -DEVENSTEP_BENCH=ON -DEVENSTEP_PYTHON=OFF) ;;
  clang) options+=(-DCMAKE_C_COMPILER=clang-19 -DCMAKE_BUILD_TYPE=Debug -DEVENSTEP_TESTS=OFF -DEVENSTEP_BENCH=ON "-DPython_EXECUTABLE=$python") ;;
  address) options+=(-DCMAKE_C_COMPILER=clang-19 -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEVENSTEP_TESTS=ON -DEVENSTEP_PYTHON=OFF -DEVENSTEP_FUZZ=ON
    "-DEVENSTEP_SANITIZE=address,undefined") ;;
  thread) options+=(-DCMAKE_C_COMPILER=clang-19 -DCMAKE_BUILD_TYPE=RelWithDebInfo -DEVENSTEP_TESTS=ON -DEVENSTEP_PYTHON=OFF -DEVENSTEP_SANITIZE=thread) ;;
  *)
    echo "scripts/build.sh: no flavour \"$flavour\": gcc, clang, address or thread" >&2
    exit 2
    ;;
esac
[ "$flavour" = clang ] && options+=("-DEVENSTEP_EXTENSION_FOLDER=$PWD/build/clang/python")
if ! cmake -B "build/$flavour" -G Ninja "${options[@]}" > "build/$flavour.configure.log" 2>&1; then
  cat "build/$flavour.configure.log" >&2
  exit 1
fi
cmake --build "build/$flavour" -- -k 0
