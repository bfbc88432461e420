"""Runs clang-tidy over the library, the program and the extension, two files at a time, and skips what has not changed.

python scripts/tidy.py BUILD_FOLDER [FILE…]     (BUILD_FOLDER holds compile_commands.json)
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("src/", "cli/", "python/ext/")


def jobs(build: pathlib.Path, wanted: list[str]) -> list[tuple[pathlib.Path, list[str]]]:
    """The files to read, each with its compiler command."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        inside = path.is_relative_to(ROOT) and str(path.relative_to(ROOT)).startswith(ROOMS)
        if inside and (not wanted or str(path.relative_to(ROOT)) in wanted):
            found[path] = shlex.split(entry["command"])
    return sorted(found.items())


def fingerprint(command: list[str], directory: pathlib.Path) -> str:
    """Of the settings, the command, and every file of the tree that the compiler reads for it."""
    words = [word for word in command if word not in ("-c",)]
    if "-o" in words:
        at = words.index("-o")
        del words[at : at + 2]
    listed = subprocess.run(
        [*words, "-MM", "-MF", "-"], cwd=directory, capture_output=True, text=True, check=True
    ).stdout
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes() + " ".join(words).encode())
    for name in listed.replace("\\\n", " ").split()[1:]:
        digest.update((directory / name).read_bytes())
    return digest.hexdigest()


def read_one(build: pathlib.Path, path: pathlib.Path, command: list[str]) -> str:
    """ "" when the file is clean, else what clang-tidy said."""
    mark = build / "tidy" / str(path.relative_to(ROOT)).replace("/", "_")
    print_ = fingerprint(command, build)
    if mark.exists() and mark.read_text() == print_:
        return ""
    done = subprocess.run(
        ["clang-tidy-19", "--quiet", "-p", str(build), str(path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        return done.stdout or done.stderr
    mark.write_text(print_)
    return ""


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    (build / "tidy").mkdir(exist_ok=True)
    todo = jobs(build, sys.argv[2:])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [text for text in pool.map(lambda job: read_one(build, *job), todo) if text]
    for text in said:
        print(text)
    print(f"{len(todo)} files read, {len(said)} with findings")
    return 1 if said else 0


if __name__ == "__main__":
    raise SystemExit(main())
