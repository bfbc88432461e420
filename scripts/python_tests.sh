#!/usr/bin/env bash
# The Python tests by two pytests at once, for a test waits half of its time: they share the files, one from the first on and one from the last.
# usage: scripts/python_tests.sh FOLDER-OF-PYTHON [PYTEST-WORD…]; both pytests' output, one after the other.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

bin="${1:?usage: scripts/python_tests.sh FOLDER-OF-PYTHON [PYTEST-WORD…]}"
shift
log=build/test-logs/python-backwards.log
export PATH="$bin:$PATH"
mkdir -p build/test-logs
claims="$(mktemp -d "$PWD/build/test-claims.XXXXXX")" || exit # its own: `make test` and `make test-more` may run side by side
trap 'rm -rf "$claims"' EXIT

half() { # ORDER PYTEST-WORD…: of the package as a user has it: nothing of the tree on the path but the tests' own
  local order="$1"
  shift
  env -u PYTHONPATH -u EVENSTEP_PROGRAM EVENSTEP_TEST_INSTALLED=1 EVENSTEP_TEST_CLAIMS="$claims" EVENSTEP_TEST_ORDER="$order" \
    "$bin/python" -m pytest -q -p no:cacheprovider --durations=10 "$@" tests/python
}

half backwards "$@" > "$log" 2>&1 &
other=$!
half forwards "$@"
result=$?
wait "$other" || result=$?
cat "$log"
exit "$result"
