"""`evenstep verify`: a script and a function of the user's on one device and on all ranks, the exit code, and its errors."""

from __future__ import annotations

import json
import pathlib
import stat
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

import pytest

# A CNN's kind of model and a scheduler; arguments, other steps than asked for, and randomness change what comes of it.
TRAIN = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    def main():
        layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)]
        if "drop" in sys.argv:
            layers.insert(3, nn.Dropout(0.5))
        model = nn.Sequential(*layers).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(torch.randn(40, 6).double()), batch_size=12, shuffle=True)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        model, optimizer, loader, scheduler = es.prepare(model, optimizer, loader, scheduler)
        for epoch in es.epochs(4):
            for (x,) in loader:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
                scheduler.step()
        print("THE SCRIPT'S OWN END", es.step())

    if __name__ == "__main__":
        main()
"""

Verify = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def verify(program: pathlib.Path, environment: dict[str, str], tmp_path: pathlib.Path) -> Verify:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), "verify", *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )

    return call


@pytest.fixture
def in_ranks(run_ranks: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """What the program starts on each rank."""

    def call(words: Sequence[str], **options: Any) -> list[Any]:
        code = "import sys; from evenstep.verify_command import main; sys.exit(main())"
        return run_ranks(code, args=words, check=False, **options)

    return call


def test_a_script_is_exact(verify: Verify, script: Callable[[str], str], tmp_path: pathlib.Path) -> None:
    name = script(TRAIN)
    done = verify("--steps", "6", "-o", "found.json", name, "--some", "argument")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact: after 6 steps on 2 ranks of this job parameters differ from one device's by ")
    assert "THE SCRIPT'S OWN END" not in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["format"] == "evenstep-verify-1" and found["report"] == done.stdout.rstrip("\n")
    assert found["exact"] is True and 0 < found["difference"] <= found["bound"] == 1e-12
    assert found["steps"] == 6 and len(found["shares"]) == 6 and found["ranks"] == 2
    assert sum(0 in shares for shares in found["shares"]) and all(sum(one) in (12, 4) for one in found["shares"])
    assert found["parameter"].endswith("weight") or found["parameter"].endswith("bias")
    assert not list((tmp_path / "runs").glob("verify.*")) and not list(tmp_path.glob("*.pt"))


# A loader that has its batches once, and another of its own call, which goes through epochs.
TWO_LOADERS = """
    import sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import evenstep as es

    class Once:
        def __init__(self):
            self.left = iter([[0, 1, 2, 3], [4, 5, 6, 7]])

        def __iter__(self):
            return self.left

    data = TensorDataset(torch.randn(8, 3).double())
    model = nn.Linear(3, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler, once = es.prepare(model, optimizer, scheduler, DataLoader(data, batch_sampler=Once()))
    loader = es.prepare(DataLoader(data, batch_size=4, shuffle=True))

    def train(batches):
        for (x,) in batches:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(once)
    for epoch in range(int(sys.argv[1])):
        with open(f"epochs.{es.rank()}.{es.world_size()}", "a") as told:
            print(epoch, loader.epoch, es.step(), file=told)
        train(loader)
        scheduler.step()
"""


@pytest.mark.parametrize("epochs", [pytest.param("0", marks=pytest.mark.more), "9"])
def test_a_script_runs_as_it_stands(
    in_ranks: Callable[..., list[Any]], script: Callable[[str], str], tmp_path: pathlib.Path, epochs: str
) -> None:
    """It ends where it ends, if that is before the steps are done, and comes through its epochs."""
    first, _ = in_ranks(["--steps", "7", script(TWO_LOADERS), epochs])
    assert first.returncode == 0 and f"after {2 if epochs == '0' else 7} steps on 2 ranks" in first.stdout, first
    told = [path.read_text() for path in sorted(tmp_path.glob("epochs.*"))]
    assert told == ([] if epochs == "0" else ["0 0 2\n1 1 4\n2 2 6\n"] * 3)


@pytest.mark.more
def test_a_script_that_draws_is_not(in_ranks: Callable[..., list[Any]], script: Callable[[str], str]) -> None:
    name = script(TRAIN)
    first, second = in_ranks(["--steps", "3", name, "drop"])
    assert (first.returncode, second.returncode) == (10, 10), first.stderr + second.stderr
    assert first.stdout.startswith("not exact: after 3 steps on 2 ranks") and second.stdout == ""
    assert "because: random numbers are drawn in the step: Dropout '3'" in first.stdout


FUNCTIONS = """
    import sys
    import torch
    from torch import nn

    def made():
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 3)

    def summed(model, batch):
        return model(batch).square().sum()

    def right():
        return {**dict(zip(("model", "optimizer", "data"), made())), "loss": lambda m, x: m(x).square().mean(), "steps": 4}

    def wrong():
        assert sys.argv[1:] == ["an", "argument"]
        return (*made(), summed)

    def drawn():
        model, optimizer, _ = made()
        data = torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=4)
        return model, optimizer, data, lambda m, x: m(x).square().mean()

    def nonsense():
        return 7

    number = 7
"""


def test_a_function(in_ranks: Callable[..., list[Any]], script: Callable[[str], str]) -> None:
    script(FUNCTIONS, "mine.py")
    first, second = in_ranks(["--steps", "3", "mine:wrong", "an", "argument"])
    assert (first.returncode, second.returncode) == (10, 10), first.stderr + second.stderr
    assert (
        first.stdout.startswith("not exact: after 3 steps") and "is not the mean of its parts' losses" in first.stdout
    )
    (alone,) = in_ranks(["mine.py:right"], ranks=1)
    assert alone.returncode == 0 and "exact: after 4 steps on 3 ranks played by one process" in alone.stdout, alone
    for one in in_ranks(["mine.py:drawn"], fresh=True):  # model and data: alike on both
        assert one.returncode == 0, one.stdout + one.stderr


def test_nothing_to_verify(run_ranks: Callable[..., list[Any]], script: Callable[[str], str]) -> None:
    script(FUNCTIONS, "mine.py")
    code = """
    import contextlib, io, sys
    from evenstep.verify_command import main

    for target, words in {
        "mine:nothing": "mine has no function 'nothing'",
        "mine:number": "mine has no function 'number'",
        "yours:function": "yours cannot be imported: No module named 'yours'",
        "yours.py:function": "yours.py cannot be imported",
        "mine:nonsense": "the function gave a int, not what es.verify takes",
        "mine.py": "wants two ranks at least",
    }.items():
        sys.argv = ["verify", target]
        with contextlib.redirect_stderr(io.StringIO()) as told:
            assert main() == 3, target
        assert words in told.getvalue() and "fix: " in told.getvalue(), told.getvalue()
    """
    run_ranks(code, ranks=1)


@pytest.mark.more
def test_a_script_that_trains_nothing(in_ranks: Callable[..., list[Any]], script: Callable[[str], str]) -> None:
    script("import evenstep as es\nprint('no training here')", "idle.py")
    ended = in_ranks(["idle.py"])
    assert ended[0].returncode == 3
    assert "idle.py made no step of an optimizer that es.prepare was given" in ended[0].stderr
    assert "on one rank ended with 3" in ended[0].stderr


def test_wrong_words(verify: Verify) -> None:
    for words, code, told in (
        (["nothing.py"], 3, "script nothing.py does not exist"),
        ([], 2, "verify: of what?"),
        (["--step", "3", "x.py"], 2, "did you mean --steps?"),
        (["--steps", "0", "x:y"], 2, "--steps 0 is out of range"),
    ):
        done = verify(*words)
        assert done.returncode == code and told in done.stderr and done.stdout == "", (words, done)


@pytest.mark.parametrize(
    ("answer", "code", "told"),
    [
        ('{"exact": false, "report": "not exact: …", "difference": null}', 10, ""),
        ('{"exact": true, "report": "exact: …"}', 0, ""),
        ('{"exact": "yes", "report": "?"}', 3, "is no result of this version"),
        ('{"exact": tru', 3, "is not valid JSON"),
        (None, 3, "said nothing of a result"),
    ],
)
def test_what_ranks_say(verify: Verify, tmp_path: pathlib.Path, answer: str | None, code: int, told: str) -> None:
    """A made-up interpreter, which writes what a rank would."""
    python = tmp_path / "python"
    write = "" if answer is None else f"printf '%s' '{answer}' > \"$7\""
    python.write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/asked.$RANK\n[ "$RANK" = 0 ] || exit 0\n{write}\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    done = verify("--python", str(python), "--json", "mine:model", "--a", "b")
    assert done.returncode == code, done
    if code in (0, 10):
        assert json.loads(done.stdout) == json.loads(answer or "")
    assert told in done.stderr
    words = (tmp_path / "asked.1").read_text().split()
    assert words[:6] == ["-u", "-m", "evenstep.verify_command", "--steps", "5", "--output"]
    assert words[7:] == ["mine:model", "--a", "b"]
    assert not list((tmp_path / "runs").glob("verify.*"))
