#!/usr/bin/env bash
# Puts the formatting of C and Python right.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
git ls-files --cached --others --exclude-standard -z '*.c' '*.h' | xargs -0 clang-format-19 -i
"$bin/ruff" check --fix --quiet .
"$bin/ruff" format --quiet .
