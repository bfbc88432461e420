"""examples/ run as they stand, alone and on two ranks with the same result."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

SMALL = {
    "char_gpt.py": "--steps 6 --batch 8 --length 16 --layers 1 --width 16 --heads 2 --text-bytes 20000 --print-every 3",
    "byte_bert.py": "--steps 6 --batch 8 --length 16 --layers 1 --width 16 --heads 2 --text-bytes 20000 --print-every 3",
    "image_cnn.py": "--epochs 2 --images 64 --batch 16 --side 12 --width 4 --blocks 1",
    "resnet.py": "--epochs 2 --images 64 --batch 16 --width 4 --blocks 1,1 --warm-up 2",
}


def test_each_has_a_test(tree: pathlib.Path) -> None:
    assert sorted(SMALL) == sorted(path.name for path in (tree / "examples").glob("*.py"))


@pytest.mark.parametrize("name", SMALL)
def test_an_example(run_ranks: Callable[..., list[Any]], tree: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
    ends, printed = [], []
    for ranks in (1, 2):
        results = run_ranks(tree / "examples" / name, ranks=ranks, args=[*SMALL[name].split(), "--save", f"{ranks}.pt"])
        ends.append(torch.load(tmp_path / f"{ranks}.pt", weights_only=True))
        printed.append([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", results[0].stdout)])
        assert len(printed[-1]) == 2, results[0].stdout
        assert all(result.stdout == "" for result in results[1:])
    assert printed[0] == pytest.approx(printed[1], abs=2e-4), printed  # they come with four digits
    apart = sum(float((one - ends[1][key]).double().square().sum()) for key, one in ends[0].items()) ** 0.5
    size = sum(float(one.double().square().sum()) for one in ends[0].values()) ** 0.5
    assert apart <= 1e-4 * size, apart / size
