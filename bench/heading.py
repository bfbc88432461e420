"""What stands above every result: when, on what, with what; and the program that is measured."""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import sys

from evenstep import bench_heading


def heading() -> dict[str, str]:
    """date, hardware, software, command of this process."""
    program = pathlib.Path(sys.argv[0])
    words = [f"{program.resolve().parent.name}/{program.name}", *sys.argv[1:]]
    return {**bench_heading.heading(), "software": bench_heading.software(), "command": "python " + " ".join(words)}


def print_heading(title: str) -> None:
    print(title)
    for name, value in heading().items():
        print(f"  {name:9} {value}")
    print()


def add_program(parser: argparse.ArgumentParser) -> None:
    """--program PATH, without which the one of the environment or of PATH is meant: look at it with `found_program`."""
    parser.add_argument("--program", default=os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep"))


def found_program(options: argparse.Namespace) -> str:
    """Its path, that holds in any folder; ends the process where there is none."""
    if options.program is None:
        sys.exit("no evenstep program: --program PATH")
    return str(pathlib.Path(options.program).resolve())
