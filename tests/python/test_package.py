"""The package as its user sees it: what it names, what help() says of it, and `python -m evenstep`."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import evenstep as es
from evenstep import __main__ as program


def _of_a_class(kind: type) -> list[tuple[str, Any]]:
    """Its own methods and properties that have no underscore."""
    found = [(name, getattr(value, "fget", None) or value) for name, value in vars(kind).items() if name[0] != "_"]
    return [(name, value) for name, value in found if callable(value)]


# What other parts of the package call on it has no underscore either; a script's are those that docs/python-api.md names.
OF_A_SESSION = {"step", "epoch", "loss"}


def _undocumented(name: str, value: Any) -> list[str]:
    if inspect.ismodule(value):
        return [one for part in value.__all__ for one in _undocumented(f"{name}.{part}", getattr(value, part))]
    if inspect.isclass(value):
        text = vars(value).get("__doc__") or ""
        parts = [part for part in _of_a_class(value) if value is not es.Session or part[0] in OF_A_SESSION]
        missing = [f"{name}.{part}" for part, of in parts if not inspect.getdoc(of)]
        return [*missing, *([name] if not text or text.startswith(value.__name__ + "(") else [])]  # a dataclass's own
    return [name] if callable(value) and not inspect.getdoc(value) else []


def test_help_says_something_of_all_that_is_public() -> None:
    public = [name for name in es.__all__ if name != "__version__"]
    assert [one for name in public for one in _undocumented(f"es.{name}", getattr(es, name))] == []


def test_completion_offers_what_is_public_alone() -> None:
    assert [name for name in dir(es) if not name.startswith("__")] == sorted(set(es.__all__) - {"__version__"})


class _File:
    """As importlib.metadata names a file that pip has put somewhere."""

    def __init__(self, path: Path) -> None:
        self.name, self.parent, self.path = path.name, path.parent, path

    def locate(self) -> Path:
        return self.path


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    calls: list[list[str]] = []
    monkeypatch.setattr(program.os, "execv", lambda path, arguments: calls.append([path, *arguments]))
    monkeypatch.setattr(sys, "argv", ["__main__.py", "run", "-n", "2"])
    monkeypatch.setenv("EVENSTEP_MAIN_PYTHON", "taken back at the end")
    handled = {number: signal.getsignal(number) for number in (signal.SIGPIPE, signal.SIGXFSZ)}
    yield calls
    for number, handler in handled.items():
        signal.signal(number, handler)


def _runs(place: Path) -> Path:
    place.parent.mkdir(parents=True)
    place.write_text("#!/bin/sh\nenv\n", encoding="utf-8")
    place.chmod(0o755)
    return place


def test_m_is_the_program_that_was_installed_with_the_package(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    there = [_File(tmp_path / "lib/evenstep/__init__.py"), _File(_runs(tmp_path / "bin/evenstep"))]
    monkeypatch.setattr(program, "files", lambda _: there)
    program.main()
    assert executed == [[str(tmp_path / "bin/evenstep"), "evenstep", "run", "-n", "2"]]
    assert os.environ["EVENSTEP_MAIN_PYTHON"] == sys.executable
    assert {signal.getsignal(signal.SIGPIPE), signal.getsignal(signal.SIGXFSZ)} == {signal.SIG_DFL}


def test_m_of_an_installation_elsewhere_is_the_program_beside_the_package(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As pip install --target leaves it: the program is not where RECORD says."""
    beside = _runs(tmp_path / "target/bin/evenstep")
    monkeypatch.setattr(program, "files", lambda _: [_File(tmp_path / "bin/evenstep")])
    monkeypatch.setattr(program, "__file__", str(tmp_path / "target/evenstep/__main__.py"))
    program.main()
    assert [call[0] for call in executed] == [str(beside)]


def test_m_without_an_installation_takes_the_program_on_path_and_else_says_so(
    executed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "files", lambda _: None)
    monkeypatch.setattr(shutil, "which", lambda _: "/opt/evenstep")
    program.main()
    assert executed == [["/opt/evenstep", "evenstep", "run", "-n", "2"]]
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(SystemExit, match="was not installed with this package"):
        program.main()


@pytest.mark.parametrize("words", [["-m", "evenstep"], ["-um", "evenstep"], ["-mevenstep"]])
def test_m_is_no_rank_of_a_launcher_and_takes_the_programs_place_before_it_is_one(
    tmp_path: Path, words: list[str]
) -> None:
    """On several hosts MPI would be started, and thrown away; on one the program would inherit the place of a rank."""
    _runs(tmp_path / "bin/evenstep")
    (tmp_path / "evenstep").symlink_to(Path(es.__file__).parent)
    (tmp_path / "evenstep-0.dist-info").mkdir()
    (tmp_path / "evenstep-0.dist-info/METADATA").write_text("Name: evenstep\nVersion: 0\n", encoding="utf-8")
    own = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    own |= {"PYTHONPATH": str(tmp_path)}
    own |= {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    own |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    run = subprocess.run(
        [sys.executable, *words, "run", "-m", "evenstep"],
        env=own,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = dict(line.split("=", 1) for line in run.stdout.splitlines() if "=" in line)
    assert told["EVENSTEP_MAIN_PYTHON"] == sys.executable
    assert "RANK" not in told
    assert "MASTER_PORT" not in told
