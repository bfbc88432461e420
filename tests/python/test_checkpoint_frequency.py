"""How often a checkpoint is written by itself, as the script says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import evenstep as es

SCRIPT = """
    import sys, time
    import torch
    import evenstep as es

    data = torch.utils.data.TensorDataset(torch.ones(40, 2))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    frequency = {"none": None, "never": 0, "differs": es.rank()}.get(sys.argv[1], sys.argv[1])
    given = torch.utils.data.DataLoader(data, batch_size=4)
    if sys.argv[1] == "trainer":
        config = es.Config(checkpoint_frequency=4)
        es.Trainer(model, optimizer, lambda model, batch: model(batch[0]).mean(), config=config).fit(given, epochs=1)
        sys.exit()
    model, optimizer, loader = es.prepare(model, optimizer, given, checkpoint_frequency=frequency)
    for batch, in loader:
        model(batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_what_is_no_frequency() -> None:
    for wrong in (-1, "often", "-3s", "0s", ""):
        with pytest.raises(ValueError, match=r"steps \(100\), seconds \('30s'\), or 0"):
            es.Config(checkpoint_frequency=wrong)
    for wrong in (True, 30.0):
        with pytest.raises(TypeError, match="checkpoint_frequency"):
            es.Config(checkpoint_frequency=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="checkpoint_frequency"):
        es.Config(options={"checkpoint_frequency": 3})
    assert es.Config(checkpoint_frequency=0).checkpoint_frequency == 0


def written(run_ranks: Any, folder: Path, frequency: str, every: str = "", check: bool = True) -> tuple[list[int], str]:
    env = {"EVENSTEP_CHECKPOINT_DIR": str(folder), "EVENSTEP_CHECKPOINT_EVERY": every, "EVENSTEP_CHECKPOINT_KEEP": "9"}
    ranks = run_ranks(SCRIPT, ranks=2, args=(frequency,), env=env, check=check)
    steps = [int(path.name.removeprefix("step-")) for path in folder.iterdir()] if folder.exists() else []
    return sorted(steps), "".join(rank.stderr for rank in ranks)


@pytest.mark.parametrize(
    ("frequency", "every", "steps", "told"),
    [
        pytest.param("4", "", [4, 8], "", marks=pytest.mark.more),
        ("4", "3", [4, 8], "checkpoint_frequency='4' of the script counts, not the launcher's 3"),
        ("none", "3", [3, 6, 9], ""),
        pytest.param("never", "3", [], "counts, not the launcher's 3", marks=pytest.mark.more),
        pytest.param("trainer", "3", [4, 8], "counts", marks=pytest.mark.more),
        pytest.param("100s", "3", [], "counts", marks=pytest.mark.more),
    ],
)
def test_the_script_counts(
    run_ranks: Any, tmp_path: Path, frequency: str, every: str, steps: list[int], told: str
) -> None:
    found, text = written(run_ranks, tmp_path / "there", frequency, every)
    assert found == steps and told in text and text.count("counts, not") == bool(told)


def test_ranks_that_say_otherwise(run_ranks: Any, tmp_path: Path) -> None:
    steps, text = written(run_ranks, tmp_path / "there", "differs", check=False)
    assert not steps and "or when to write checkpoints" in text
