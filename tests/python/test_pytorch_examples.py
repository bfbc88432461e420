"""What scripts/pytorch_examples.py takes for an example that ran: scripts of ours in the place of PyTorch's, without torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import select
import signal
import subprocess
import sys
from types import ModuleType

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "pytorch_examples.py"
MADE = "evenstep: rank 0 made 3 collectives in 1 group"
SAVES = "import pathlib; pathlib.Path(f'{len(list(pathlib.Path().glob(\"*.pt\")))}.pt').touch()"
LOADS = "import pathlib; [print(f'evenstep: rank 0 loaded {one}') for one in pathlib.Path().glob('*.pt')]"


@pytest.fixture
def examples(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pytorch_examples", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "TREE", tmp_path)  # no place is taken
    return module


def outcomes(examples: ModuleType, checkout: pathlib.Path, script: list[str], **of: object) -> list[tuple[bool, str]]:
    folder = checkout / "distributed" / "ddp"
    folder.mkdir(parents=True)
    (folder / "multigpu.py").write_text("\n".join(script))  # one that starts its ranks itself
    given = {"says": "", "saves": "*.pt", "ranks": 1, **of}
    return list(examples.outcomes(examples.Example("ddp/multigpu.py", **given), checkout))


def test_what_saves_and_goes_on_ran(examples: ModuleType, tmp_path: pathlib.Path) -> None:
    script = [LOADS, SAVES, f"print({MADE!r})"]
    assert outcomes(examples, tmp_path, script, times=2) == [(True, "3 collectives on each rank")] * 2


@pytest.mark.parametrize(
    ("script", "of", "count", "why"),
    [
        ([f"print({MADE!r})"], {}, 1, "saved nothing as '*.pt'"),
        ([SAVES, f"print({MADE!r})"], {"times": 2}, 2, "rank 0 did not load 0.pt"),
        ([SAVES, f"print({MADE!r})"], {"says": "trained", "saves": ""}, 1, "did not say 'trained'"),
        ([SAVES], {}, 1, "rank 0 made no collectives"),
        ([SAVES, f"print({MADE!r})", "raise SystemExit(3)"], {}, 1, "FAILED with 3"),
    ],
)
def test_what_did_not_run_failed(
    examples: ModuleType, tmp_path: pathlib.Path, script: list[str], of: dict[str, object], count: int, why: str
) -> None:
    told = outcomes(examples, tmp_path, script, **of)
    assert [ran for ran, _ in told] == [True] * (count - 1) + [False]
    assert why in told[-1][1]


def test_one_that_does_not_end_failed(
    examples: ModuleType, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples, "LIMIT", 0.2)
    told = outcomes(examples, tmp_path, ["import signal", "signal.pause()"], times=2)
    assert len(told) == 1 and not told[0][0] and "had not ended after 0.2 s" in told[0][1]


def test_ranks_in_sessions_of_their_own_are_ended(examples: ModuleType) -> None:
    rank = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True)"
    with subprocess.Popen(
        [sys.executable, "-c", start], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as one:
        assert one.stdout is not None
        pid = int(one.stdout.readline())
        handle = os.pidfd_open(pid)
        try:
            examples.end_all(one.pid)
            assert select.select([handle], [], [], 60)[0]  # it has ended
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        assert one.wait(timeout=60) in (-signal.SIGKILL, 0)  # 0: it had seen its rank's end before its own came
