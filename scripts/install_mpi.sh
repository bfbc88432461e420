#!/usr/bin/env bash
# An MPI library from PyPI, to test groups over, into build/mpi/NAME: a prefix of its own, since all are called mpirun.
# usage: scripts/install_mpi.sh NAME [PACKAGE]; the package is called as the library where none is named.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

name="${1:?usage: scripts/install_mpi.sh NAME [PACKAGE]}"
rm -rf "build/mpi/$name"
"${EVENSTEP_VENV:-$PWD/.venv}/bin/python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt \
  --no-deps --ignore-installed --prefix "build/mpi/$name" "${2:-$name}"
