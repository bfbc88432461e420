"""`python -m evenstep …` is the program `evenstep …` that was installed with this package, and its ranks run this Python."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, files


def _program() -> str | None:
    """Where the package was installed its program is known, on PATH or not."""
    try:
        installed = files("evenstep") or []
    except PackageNotFoundError:  # a build in the tree
        installed = []
    for file in installed:
        if file.name == "evenstep" and file.parent.name == "bin":
            return os.path.realpath(file.locate())
    return shutil.which("evenstep")


def main() -> None:
    program = _program()
    if program is None:
        sys.exit(
            "evenstep: the program was not installed with this package, and is not on PATH: pip install . in the source tree"
        )
    os.environ.setdefault("EVENSTEP_PYTHON", sys.executable)
    os.execv(program, ["evenstep", *sys.argv[1:]])


if __name__ == "__main__":
    main()
