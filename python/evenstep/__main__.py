"""`python -m evenstep …` is the program `evenstep …` that was installed with this package, and its ranks run this Python."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path


def _program() -> str | None:
    """Where the package was installed its program is known, on PATH or not."""
    try:
        installed = files("evenstep") or []
    except PackageNotFoundError:  # a build in the tree
        installed = []
    places = [str(file.locate()) for file in installed if file.name == "evenstep" and file.parent.name == "bin"]
    places.append(str(Path(__file__).parent.parent / "bin" / "evenstep"))  # pip install --target names another one
    for place in places:
        if os.path.isfile(place) and os.access(place, os.X_OK):
            return os.path.realpath(place)
    return shutil.which("evenstep")


def main() -> None:
    program = _program()
    if program is None:
        sys.exit(
            "evenstep: the program was not installed with this package, and is not on PATH: pip install . in the source tree"
        )
    os.environ["EVENSTEP_MAIN_PYTHON"] = sys.executable  # cli/python.c
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and by whatever it becomes
        signal.signal(ignored, signal.SIG_DFL)
    os.execv(program, ["evenstep", *sys.argv[1:]])


if __name__ == "__main__":
    main()
