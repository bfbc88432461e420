#!/usr/bin/env bash
# Builds one flavour into build/FLAVOUR with warnings as errors: gcc (with the flags of the wheel); by clang, address (ASan+UBSan, and the fuzz
# targets), thread (TSan: the library and the tests alone) and clang: what these do not compile, the extension and the benchmarks, which are not
# linked, and what lint asks of how each file is compiled.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

flavour="${1:?usage: scripts/build.sh gcc|clang|address|thread}"
python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
options=(-DEVENSTEP_WERROR=ON)
case "$flavour" in
  gcc) options+=(-DCMAKE_C_COMPILER=gcc -DCMAKE_BUILD_TYPE=Release -DEVENSTEP_TESTS=ON -DEVENSTEP_BENCH=ON -DEVENSTEP_PYTHON=OFF
    "-DCMAKE_INSTALL_LIBDIR=lib/$(gcc -print-multiarch)") ;; # as under /usr
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
case "$flavour" in
  thread) wanted=(tests/all) ;;
  clang)
    wanted=()
    for room in bench python; do
      mapfile -t objects < <(ninja -C build/clang -t targets all | grep -oE "^$room/[^:]*\.o:" | tr -d ':')
      wanted+=("${objects[@]:?ninja names no object of $room/ in build/clang}")
    done
    ;;
  *) wanted=(all) ;;
esac
cmake --build "build/$flavour" -- -k 0 "${wanted[@]}"
