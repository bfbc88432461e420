#!/usr/bin/env bash
# The Python tests by several pytests at once, one more than cores (four at most), for a test waits half of its time: they share the files, each
# begins at another one.
# usage: scripts/python_tests.sh FOLDER-OF-PYTHON [PYTEST-WORD…]; all pytests' output, one after the other. Words that name files
# (tests/python/test_comm.py): these, in place of all.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

bin="${1:?usage: scripts/python_tests.sh FOLDER-OF-PYTHON [PYTEST-WORD…]}"
shift
parts=$(($(nproc) + 1))
[ "$parts" -le 4 ] || parts=4
files=(tests/python)
for word in "$@"; do
  case "$word" in tests/*) files=() ;; esac
done
logs=build/test-logs
export PATH="$bin:$PATH"
mkdir -p "$logs"
claims="$(mktemp -d "$PWD/build/test-claims.XXXXXX")" || exit # its own: `make test` and `make test-more` may run side by side
trap 'rm -rf "$claims"' EXIT

# NUMBER PYTEST-WORD…: of the package as a user has it: nothing of the tree on the path but the tests' own, whose modules are compiled once, not
# by each pytest and rank.
part() {
  local number="$1"
  shift
  env -u PYTHONPATH -u EVENSTEP_PROGRAM -u PYTHONDONTWRITEBYTECODE EVENSTEP_TEST_INSTALLED=1 EVENSTEP_TEST_CLAIMS="$claims" \
    EVENSTEP_TEST_PART="$number/$parts" "$bin/python" -m pytest -q -p no:cacheprovider --durations=10 "$@" ${files[@]+"${files[@]}"}
}

others=()
for ((number = 1; number < parts; number++)); do
  part "$number" "$@" > "$logs/python-$number.log" 2>&1 &
  others+=($!)
done
part 0 "$@"
result=$?
for ((number = 1; number < parts; number++)); do
  wait "${others[number - 1]}" || result=$?
  cat "$logs/python-$number.log"
done
exit "$result"
