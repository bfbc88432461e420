#!/usr/bin/env bash
# The Python tests by several pytests at once, one more than cores (four at most), for a test waits half of its time: they share the files, each
# begins at another one, and reads what it runs alone: 14 s of a core for all.
# usage: scripts/python_tests.sh FOLDER-OF-PYTHON [PYTEST-WORD…]; all pytests' output, one after the other. Words that name files
# (tests/python/test_comm.py): these, in place of all; those that name single tests (…::test_sums) are left to one pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

bin="${1:?usage: scripts/python_tests.sh FOLDER-OF-PYTHON [PYTEST-WORD…]}"
shift
parts=$(($(nproc) + 1))
[ "$parts" -le 4 ] || parts=4
files=(tests/python)
for word in "$@"; do
  case "$word" in tests/*) files=() ;; esac
  case "$word" in *::*) parts=1 ;; esac
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
  local shared=()
  [ "$parts" -eq 1 ] || shared=(EVENSTEP_TEST_CLAIMS="$claims" EVENSTEP_TEST_PART="$number/$parts")
  env -u PYTHONPATH -u EVENSTEP_PROGRAM -u PYTHONDONTWRITEBYTECODE EVENSTEP_TEST_INSTALLED=1 ${shared[@]+"${shared[@]}"} \
    "$bin/python" -m pytest -q -p no:cacheprovider --durations=10 "$@" ${files[@]+"${files[@]}"}
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
if [ "$result" -eq 0 ] && [ "$parts" -gt 1 ] && [ ! -e "$claims/ran" ]; then
  echo "$0: no test has these words: $*" >&2
  result=5
fi
exit "$result"
