"""Where the program writes what it has measured: looked at before the minutes that it takes."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess

import pytest


@pytest.mark.parametrize(
    "words",
    [
        ("bench", "balance", "--csv"),
        ("bench", "balance", "-o"),
        ("bench", "comm", "-o"),
        ("plan", "-o"),
        ("verify", "-o"),
    ],
    ids=" ".join,
)
def test_a_result_that_could_not_be_written_is_told_before_the_work(
    program: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path, words: tuple[str, ...]
) -> None:
    script = [] if words[0] == "bench" else ["script.py"]
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place, said in (
        ("nowhere/result", "nothing was begun yet"),
        (".", "is a folder"),
        (pipe.name, "which a file would take the place of"),
        ("/dev/no-such-device", "which a file would take the place of"),
    ):
        done = subprocess.run(
            [program, *words, place, *script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode in (3, 5) and said in done.stderr and "it ran" not in done.stderr, done.stderr
        assert done.stdout == "" and stat.S_ISFIFO(pipe.stat().st_mode)
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["pipe", "script.py"]
