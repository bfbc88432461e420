#!/usr/bin/env bash
# All checks that read the code without running it. One line each; a failed one shows what it found.
# shellcheck disable=SC2317  # functions are called by name
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
failed=0
mkdir -p build

check() { # NAME COMMAND…
  local name="$1" log="build/lint.log"
  shift
  if "$@" > "$log" 2>&1; then
    echo "  ok    $name"
  else
    echo "  FAIL  $name"
    sed 's/^/        /' "$log"
    failed=1
  fi
}

c_files() { git ls-files --cached --others --exclude-standard -z '*.c' '*.h'; }
c_format() { c_files | xargs -0 clang-format-19 --dry-run --Werror; }
shell_files() { git ls-files --cached --others --exclude-standard -z '*.sh' .ci/run | xargs -0 shellcheck; }
tidy() {
  [ -f build/clang/compile_commands.json ] || scripts/build.sh clang || return 1
  "$bin/python" scripts/tidy.py build/clang
}

check "clang-format" c_format
check "ruff check" "$bin/ruff" check .
check "ruff format" "$bin/ruff" format --check .
check "mypy" "$bin/mypy"
check "shellcheck" shell_files
check "room order" "$bin/python" scripts/check_rooms.py
check "links" "$bin/python" scripts/check_links.py
[ "${EVENSTEP_LINT_QUICK:-}" = 1 ] || check "clang-tidy" tidy
exit "$failed"
