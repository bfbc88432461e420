#!/usr/bin/env bash
# Builds the C core for aarch64 and runs tests of it under qemu-user: the kernels of NEON, and collectives by them. Ends with 77 where a tool is missing.
# usage: scripts/aarch64.sh [CTEST-WORD…]; without words the tests of base and comm, and the conformance of collectives, which an emulator can run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="$PWD/build/aarch64"
export EVENSTEP_AARCH64_ROOT="$folder/root"
libraries=(libcmocka0 libcmocka-dev libxxhash0 libxxhash-dev)

missing=()
command -v aarch64-linux-gnu-gcc > /dev/null || missing+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
command -v qemu-aarch64-static > /dev/null || missing+=(qemu-user-static)
command -v apt-get > /dev/null || missing+=(apt)
if [ "${#missing[@]}" -gt 0 ]; then
  echo "aarch64: not built and not run: apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 77
fi

# The libraries as Debian builds them for aarch64, unpacked; apt's own lists and this machine's architectures stay as they are.
if [ ! -e "$folder/root.stamp" ]; then
  rm -rf "$folder" && mkdir -p "$folder/lists/partial" "$folder/archives/partial" "$EVENSTEP_AARCH64_ROOT"
  touch "$folder/status"
  apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o "Dir::State::Lists=$folder/lists"
    -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder" -o APT::Sandbox::User=root)
  "${apt[@]}" update
  (cd "$folder/archives" && "${apt[@]}" download "${libraries[@]}")
  for package in "$folder"/archives/*.deb; do
    dpkg-deb -x "$package" "$EVENSTEP_AARCH64_ROOT"
  done
  touch "$folder/root.stamp"
fi

cmake -S . -B "$folder/build" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$PWD/cmake/aarch64.cmake" -DEVENSTEP_PYTHON=OFF -DEVENSTEP_PROGRAM=OFF -DEVENSTEP_TESTS=ON \
  -DEVENSTEP_WERROR=ON > "$folder/configure.log" 2>&1 || {
  cat "$folder/configure.log"
  exit 1
}
cmake --build "$folder/build" --target tests/base/all tests/comm/all tests/conformance/all
[ $# -gt 0 ] || set -- -R '^(base|comm)_' -E '^comm_costs$' # whose writers of one file, at once, did not end under the emulator
exec ctest --test-dir "$folder/build" --output-on-failure --no-tests=error "$@"
