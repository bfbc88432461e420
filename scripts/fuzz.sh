#!/usr/bin/env bash
# Runs every fuzz target of fuzz/ for SECONDS each, from its seed corpus; a crash stays in build/fuzz/crashes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seconds="${1:?usage: scripts/fuzz.sh SECONDS}"
scripts/build.sh fuzz > build/fuzz.log 2>&1 || {
  cat build/fuzz.log >&2
  exit 1
}
mkdir -p build/fuzz/crashes
ran=0
for target in build/fuzz/fuzz/fuzz_*; do
  [ -x "$target" ] || continue
  name="$(basename "$target")"
  corpus="build/fuzz/corpus/$name"
  mkdir -p "$corpus"
  seeds=()
  [ -d "fuzz/seeds/${name#fuzz_}" ] && seeds=("fuzz/seeds/${name#fuzz_}")
  echo "$name: $seconds s"
  if ! "$target" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -artifact_prefix="build/fuzz/crashes/$name-" \
    "$corpus" "${seeds[@]}" > "build/fuzz/$name.log" 2>&1; then
    tail -n 40 "build/fuzz/$name.log" >&2
    echo "$name found something: build/fuzz/crashes" >&2
    exit 1
  fi
  tail -n 1 "build/fuzz/$name.log"
  ran=$((ran + 1))
done
[ "$ran" -gt 0 ] || {
  echo "no fuzz target was built" >&2
  exit 1
}
