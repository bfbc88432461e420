"""Makes a virtual environment with some packages of another and what these need, without installing them again: their files are linked.

python scripts/second_environment.py FOLDER PACKAGE…     (run by the Python of the environment that has them)

What pip has written down of each package says which files are its own; whatever else is in the other environment is not in the new one.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

from packaging.requirements import Requirement


def needed(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """These packages and all that they ask for here, with the extras that they ask for, each once."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    wanted = [(Requirement(name), {""}) for name in names]  # and the extras of the package that asks for it
    while wanted:
        one, extras = wanted.pop()
        if one.marker is not None and not any(one.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        distribution = importlib.metadata.distribution(one.name)
        name = distribution.metadata["Name"]
        if (name, frozenset(one.extras)) not in seen:
            seen.add((name, frozenset(one.extras)))
            found[name] = distribution
            wanted += [(Requirement(each), {"", *one.extras}) for each in distribution.requires or ()]
    return found


def link(source: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def take(distribution: importlib.metadata.Distribution, here: pathlib.Path, there: pathlib.Path) -> int:
    """Its files from `here`, one environment's root, to `there`; programs are told the other's Python. How many are its own."""
    taken = 0
    python = os.fsencode(here / "bin")
    for file in distribution.files or ():
        source = pathlib.Path(os.path.normpath(file.locate()))
        if not source.is_relative_to(here) or not source.exists():
            continue
        taken += 1
        target = there / source.relative_to(here)
        if source.parent == here / "bin":
            target.write_bytes(source.read_bytes().replace(python, os.fsencode(there / "bin")))
            shutil.copymode(source, target)
        elif not target.exists():
            link(source, target)
    return taken


def main() -> int:
    here, there = pathlib.Path(sys.prefix), pathlib.Path(sys.argv[1]).absolute()
    packages = needed(["pip", *sys.argv[2:]])
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(there)], check=True)
    for name, distribution in packages.items():
        if not take(distribution, here, there):  # an editable one, or one of another environment that this one sees
            print(f"scripts/second_environment.py: {name} has no files below {here}: install it there", file=sys.stderr)
            return 1
    print("linked:", *sorted(f"{one.metadata['Name']}=={one.version}" for one in packages.values()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
