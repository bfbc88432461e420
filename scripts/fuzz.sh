#!/usr/bin/env bash
# Runs every fuzz target of fuzz/ for SECONDS each, one a core, from its seed corpus; a crash stays in build/fuzz/crashes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds="${1:?usage: scripts/fuzz.sh SECONDS}"
python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
mkdir -p build/fuzz/crashes
scripts/build.sh address > build/fuzz/build.log 2>&1 || {
  cat build/fuzz/build.log >&2
  exit 1
}

# A reader in Python: the loop is its own.
fuzz_python() {
  local target="$1" name
  name="$(basename "$target" .py)"
  if ! "$python" "$target" "$seconds" > "build/fuzz/$name.log" 2>&1; then
    tail -n 40 "build/fuzz/$name.log" >&2
    echo "$name found something: build/fuzz/crashes" >&2
    return 1
  fi
  echo "$name, $seconds s: $(tail -n 1 "build/fuzz/$name.log")"
}

fuzz() {
  local target="$1" name corpus seeds=()
  if [ "${target%.py}" != "$target" ]; then
    fuzz_python "$target"
    return
  fi
  name="$(basename "$target")"
  corpus="build/fuzz/corpus/$name"
  mkdir -p "$corpus"
  [ -d "fuzz/seeds/${name#fuzz_}" ] && seeds=("fuzz/seeds/${name#fuzz_}")
  if ! "$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -artifact_prefix="build/fuzz/crashes/$name-" \
    "$corpus" "${seeds[@]}" > "build/fuzz/$name.log" 2>&1; then
    tail -n 40 "build/fuzz/$name.log" >&2
    echo "$name found something: build/fuzz/crashes" >&2
    return 1
  fi
  echo "$name, $seconds s: $(tail -n 1 "build/fuzz/$name.log")"
}
export -f fuzz fuzz_python
export seconds python

targets=()
for target in build/address/fuzz/fuzz_*; do
  [ ! -x "$target" ] || targets+=("$target")
done
[ "${#targets[@]}" -gt 0 ] || {
  echo "no fuzz target was built" >&2
  exit 1
}
targets+=(fuzz/*_fuzz.py)
# they need the extension: of any build of this tree, else of one of their own
if ! compgen -G "build/*/python/_core.abi3.so" > /dev/null && [ ! -e python/evenstep/_core.abi3.so ]; then
  { cmake -B build/fuzz-python -G Ninja -DEVENSTEP_PROGRAM=OFF "-DEVENSTEP_EXTENSION_FOLDER=$PWD/build/fuzz-python/python" \
    "-DPython_EXECUTABLE=$python" && cmake --build build/fuzz-python --target _core; } > build/fuzz/build.log 2>&1 || {
    cat build/fuzz/build.log >&2
    exit 1
  }
fi
# shellcheck disable=SC2016  # the inner shell's
printf '%s\0' "${targets[@]}" | xargs -0 -n 1 -P "$(nproc)" bash -c 'fuzz "$1"' fuzz
