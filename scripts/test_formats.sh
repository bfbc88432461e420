#!/usr/bin/env bash
# Checkpoints of other libraries by those libraries themselves: TensorFlow, transformers, Lightning, DeepSpeed (scripts/install_formats.sh), which
# nothing else here installs. Of the wheel, which is built anew (EVENSTEP_WHEEL=FILE: that one). Further words are pytest's: -k tensorflow.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install_formats.sh
bin="$PWD/build/formats/bin"
wheel="${EVENSTEP_WHEEL:-}"
if [ -z "$wheel" ]; then
  scripts/wheel.sh
  wheel="$(echo dist/evenstep-*.whl)"
fi
"$bin/python" -m pip install -qq --disable-pip-version-check --no-deps --force-reinstall "$wheel"
"$bin/python" - << 'END'
import platform
from importlib.metadata import PackageNotFoundError, version

print(f"Python {platform.python_version()}, evenstep {version('evenstep')}", flush=True)
for name in ("torch", "numpy", "safetensors", "tensorflow-cpu", "transformers", "lightning", "deepspeed"):
    try:
        print(f"{name} {version(name)}", flush=True)
    except PackageNotFoundError:
        print(f"{name}: not here", flush=True)
END
export EVENSTEP_TEST_MORE=1 EVENSTEP_TEST_INSTALLED=1 PATH="$bin:$PATH" TF_CPP_MIN_LOG_LEVEL=2
exec env -u PYTHONPATH -u EVENSTEP_PROGRAM python -m pytest -v -ra -p no:cacheprovider tests/python/test_formats_elsewhere.py "$@"
