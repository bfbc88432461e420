"""examples/ run as they stand, alone and on two ranks with the same result."""

from __future__ import annotations

import importlib.util
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
    "bitwise.py": "--epochs 2 --images 48 --batch 16 --side 8 --width 2 --print-every 3",
}
SMALL_TEXT = "--steps 4 --batch 8 --length 8 --layers 1 --width 8 --heads 2 --text-bytes 20000 --print-every 2"
OF_MODELS = {  # each with a model of evenstep.models
    "char_gpt.py": f"--model gpt2 {SMALL_TEXT}",
    "byte_bert.py": f"--model bert {SMALL_TEXT}",
    "image_cnn.py": "--model simplecnn --epochs 2 --images 32 --batch 16 --side 12 --width 4",
}


def test_each_has_a_test(tree: pathlib.Path) -> None:
    assert sorted(SMALL) == sorted(path.name for path in (tree / "examples").glob("*.py"))


@pytest.mark.parametrize(("name", "words"), [*SMALL.items(), *OF_MODELS.items()], ids=str)
def test_an_example(
    run_ranks: Callable[..., list[Any]], tree: pathlib.Path, tmp_path: pathlib.Path, name: str, words: str
) -> None:
    ends, printed = [], []
    for ranks in (1, 2):
        results = run_ranks(tree / "examples" / name, ranks=ranks, args=[*words.split(), "--save", f"{ranks}.pt"])
        ends.append(torch.load(tmp_path / f"{ranks}.pt", weights_only=True))
        printed.append([float(loss) for loss in re.findall(r"loss (\d+\.\d+)", results[0].stdout)])
        assert len(printed[-1]) == 2, results[0].stdout
        assert all(result.stdout == "" for result in results[1:])
    assert printed[0] == pytest.approx(printed[1], abs=2e-4), printed  # they come with four digits
    apart = sum(float((one - ends[1][key]).double().square().sum()) for key, one in ends[0].items()) ** 0.5
    size = sum(float(one.double().square().sum()) for one in ends[0].values()) ** 0.5
    assert apart <= (0 if name == "bitwise.py" else 1e-4) * size, apart / size


def test_the_bits_that_an_example_prints_tell_of_one(tree: pathlib.Path) -> None:
    spec = importlib.util.spec_from_file_location("bitwise", tree / "examples" / "bitwise.py")
    assert spec is not None and spec.loader is not None
    bitwise = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bitwise)
    model = torch.nn.BatchNorm1d(3)
    before = bitwise.bits(model)
    assert before == bitwise.bits(model) and len(before) == 8
    model.running_mean[2] = torch.nextafter(torch.zeros(()), torch.ones(()))
    assert bitwise.bits(model) != before
