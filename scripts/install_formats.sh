#!/usr/bin/env bash
# Other libraries whose checkpoints Evenstep reads and writes (PyPI, at the versions in constraints.txt), into build/formats, beside .venv's torch, which
# is linked (scripts/second_environment.py): tests/python/test_formats_elsewhere.py runs there. 3 GB. What cannot be had is said, and is no failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

python="${EVENSTEP_VENV:-$PWD/.venv}/bin/python"
venv=build/formats
libraries=(tensorflow-cpu transformers lightning deepspeed)
stamp="$venv/evenstep.stamp"
state="$("$python" -V) $(cksum < constraints.txt) ${libraries[*]}"
[ "$(cat "$stamp" 2> /dev/null)" != "$state" ] || exit 0

mkdir -p build
rm -rf "$venv"
"$python" scripts/second_environment.py "$venv" torch numpy pytest pytest-timeout hypothesis safetensors > build/formats.log || exit
pip=("$venv/bin/python" -m pip install -qq --disable-pip-version-check --constraint constraints.txt)
"${pip[@]}" wheel 2>> build/formats.log # without it pip 23 builds none
for library in "${libraries[@]}"; do
  echo "Installing $library into $venv"
  # DeepSpeed comes as source, asks for torch while it is built, and would compile its kernels, which no test wants
  if ! DS_BUILD_OPS=0 DS_ACCELERATOR=cpu "${pip[@]}" --no-build-isolation "$library" 2>> build/formats.log; then
    echo "pip could not (build/formats.log): the tests of $library are left out"
  fi
done
echo "$state" > "$stamp"
