"""Runs clang-tidy over the library, the program and the extension, one process a core, and skips what has not changed.

python scripts/tidy.py BUILD_FOLDER [FILE…]     (BUILD_FOLDER holds compile_commands.json)

EVENSTEP_TIDY_NODES=N: the analyzer leaves a function after N states of it, not after clang's 225000: most of its time goes into the last ones
of few large functions. What was found clean without it is not read again with it.
"""

from __future__ import annotations

import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("src/", "cli/", "python/ext/")
INCLUDED = re.compile(rb'^\s*#\s*include\s*[<"]([^>"]+)', re.MULTILINE)
AT_ONCE = 8  # files a process, each of which first reads a hundred megabytes of libraries
NODES = os.environ.get("EVENSTEP_TIDY_NODES", "")

Job = tuple[pathlib.Path, list[str], str]


def jobs(build: pathlib.Path, wanted: list[str]) -> list[Job]:
    """The files to read, each with its compiler command, and the fingerprint that it has now: it may be changed while clang-tidy reads it."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["directory"], entry["file"]).resolve()
        inside = path.is_relative_to(ROOT) and str(path.relative_to(ROOT)).startswith(ROOMS)
        if inside and (not wanted or str(path.relative_to(ROOT)) in wanted):
            found[path] = shlex.split(entry["command"])
    return [(path, command, fingerprint(path, command)) for path, command in sorted(found.items())]


@functools.cache
def content(path: pathlib.Path) -> bytes:
    return path.read_bytes()


@functools.cache
def includes(path: pathlib.Path) -> frozenset[pathlib.Path]:
    """The tree's own files that this one names, whatever the preprocessor would make of the lines around."""
    names = {name.decode() for name in INCLUDED.findall(content(path))}
    places = (path.parent, ROOT / "src", ROOT / "include", ROOT)
    return frozenset(place / name for name in names for place in places if (place / name).is_file())


def fingerprint(path: pathlib.Path, command: list[str]) -> str:
    """Of the settings, the command, and every file of the tree that the compiler reads for it."""
    words = [word for word in command if word not in ("-c",)]
    if "-o" in words:
        at = words.index("-o")
        del words[at : at + 2]
    read, new = set(), {path}
    while new:
        read |= new
        new = {each for one in new for each in includes(one)} - read
    digest = hashlib.sha256((ROOT / ".clang-tidy").read_bytes() + " ".join(words).encode())
    for one in sorted(read):
        digest.update(content(one))
    return digest.hexdigest()


def mark(build: pathlib.Path, path: pathlib.Path, nodes: str) -> pathlib.Path:
    """Where the fingerprint of a file is kept that was found clean."""
    return build / f"tidy{nodes}" / str(path.relative_to(ROOT)).replace("/", "_")


def is_marked(build: pathlib.Path, job: Job) -> bool:
    kept = [mark(build, job[0], nodes) for nodes in {"", NODES}]
    return any(each.exists() and each.read_text() == job[2] for each in kept)


def read_some(build: pathlib.Path, some: Sequence[Job]) -> list[str]:
    """What clang-tidy said of the files that are not clean; with several, each of them is read again by itself."""
    words = ["-Xclang", "-analyzer-config", "-Xclang", f"max-nodes={NODES}"] if NODES else []
    options = ["--quiet", "-p", str(build), *(f"--extra-arg={word}" for word in words)]
    done = subprocess.run(
        ["clang-tidy-19", *options, *(str(job[0]) for job in some)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        return (
            [done.stdout or done.stderr]
            if len(some) == 1
            else [said for one in some for said in read_some(build, [one])]
        )
    for job in some:
        mark(build, job[0], NODES).write_text(job[2])
    return []


def main() -> int:
    build = pathlib.Path(sys.argv[1]).resolve()
    (build / f"tidy{NODES}").mkdir(exist_ok=True)
    todo = jobs(build, sys.argv[2:])
    new = [job for job in todo if not is_marked(build, job)]
    parts = [new[at : at + AT_ONCE] for at in range(0, len(new), AT_ONCE)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        said = [text for texts in pool.map(lambda part: read_some(build, part), parts) for text in texts]
    for text in said:
        print(text)
    print(f"{len(todo)} files read, {len(said)} with findings")
    return 1 if said else 0


if __name__ == "__main__":
    raise SystemExit(main())
