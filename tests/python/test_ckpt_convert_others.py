"""Files that DeepSpeed and Lightning write, in their published layouts: read whole, with what cannot be carried listed."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch

from evenstep import ckpt_convert
from evenstep.convert_contents import Refused
from evenstep.convert_formats import read

SHAPES = [{"a.weight": (3, 5), "a.bias": (3,)}, {"b.weight": (2, 2)}]


@pytest.fixture
def other_library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives a class of a library that is not installed, for pickling; gone when the file is read."""
    made = []

    def make(module: str, name: str, base: type = object) -> Any:
        made.append(module)
        parts = module.split(".")
        for i in range(len(parts)):
            name_here = ".".join(parts[: i + 1])
            if name_here not in sys.modules:
                monkeypatch.setitem(sys.modules, name_here, types.ModuleType(name_here))
        cls = type(name, (base,), {"__module__": module})
        setattr(sys.modules[module], name, cls)
        return cls

    yield make
    assert made


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("deepspeed", "lightning"))]:
        monkeypatch.delitem(sys.modules, name)


def values_of(names: list[str], shift: float) -> dict[str, torch.Tensor]:
    shapes = {name: shape for group in SHAPES for name, shape in group.items()}
    return {
        n: torch.arange(math.prod(shapes[n])).float().reshape(shapes[n]) + shift + 100 * i for i, n in enumerate(names)
    }


def partition(values: dict[str, torch.Tensor], ranks: int) -> list[list[torch.Tensor]]:
    """[group][rank]: the flat vector of a group, padded to a multiple of 2 * ranks, cut evenly."""
    cut = []
    for group in SHAPES:
        flat = torch.cat([values[name].flatten() for name in group])
        flat = torch.cat([flat, torch.full((-flat.numel() % (2 * ranks),), -1.0)])
        cut.append(list(flat.chunk(ranks)))
    return cut


def shapes() -> list[OrderedDict[str, torch.Size]]:
    return [OrderedDict((name, torch.Size(shape)) for name, shape in group.items()) for group in SHAPES]


def write_zero(
    folder: pathlib.Path, stage: Any, ranks: int, values: dict[str, dict[str, torch.Tensor]], scaler: Any
) -> pathlib.Path:
    """A folder of ZeRO 1 or 2, with the tag's folder that `latest` names."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    (folder / "zero_to_fp32.py").write_text("raise SystemExit")
    module = {name: tensor.half() for name, tensor in values["weights"].items()}
    main = {
        "module": OrderedDict(
            [*module.items(), ("norm.running_mean", torch.ones(3).half()), ("tied", module["a.bias"])]
        ),
        "buffer_names": ["norm.running_mean"],
        "param_shapes": shapes(),
        "shared_params": {"tied": "a.bias"},
        "optimizer": None,
        "lr_scheduler": {"last_epoch": 7},
        "global_steps": 7,
        "skipped_steps": 1,
        "dp_world_size": ranks,
        "ds_version": "0.16.0",
        "ds_config": {"zero_optimization": {"stage": 1}},
        "best_accuracy": 0.5,
    }
    torch.save(main, tag / "mp_rank_00_model_states.pt")
    parts = {key: partition(one, ranks) for key, one in values.items()}
    for rank in range(ranks):
        base = {
            "state": {
                g: {"step": torch.tensor(7.0), "exp_avg": parts["m"][g][rank], "exp_avg_sq": parts["v"][g][rank]}
                for g in range(len(SHAPES))
            },
            "param_groups": [{"lr": 0.1, "weight_decay": wd, "params": [g]} for g, wd in enumerate((0.01, 0.0))],
        }
        state = {
            "loss_scaler": scaler,
            "zero_stage": stage,
            "partition_count": [ranks, ranks],
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [group[rank].clone() for group in parts["weights"]],
        }
        whole = {"optimizer_state_dict": state, "ds_version": "0.16.0"}
        torch.save(whole, tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return tag


def zero_values() -> dict[str, dict[str, torch.Tensor]]:
    names = ["a.weight", "a.bias", "b.weight"]
    return {"weights": values_of(names, 0.123), "m": values_of(names, 1000), "v": values_of(names, 2000)}


@pytest.mark.parametrize("ranks", [1, 3])
def test_zero_1_and_2(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, other_library: Any, ranks: int) -> None:
    values = zero_values()
    scaler = other_library("deepspeed.runtime.fp16.loss_scaler", "LossScaler")()
    scaler.cur_scale = 1
    stage = other_library("deepspeed.runtime.zero.config", "ZeroStageEnum", int)(2)
    write_zero(tmp_path / "ds", stage, ranks, values, scaler)
    forget(monkeypatch)
    contents = read(tmp_path / "ds")
    assert contents.format == f"DeepSpeed ZeRO stage 2, {ranks} ranks" and contents.step == 7
    model = contents.model()
    assert list(model) == ["a.weight", "a.bias", "b.weight", "norm.running_mean", "tied"]
    for name, tensor in values["weights"].items():
        assert torch.equal(model[name], tensor)  # fp32, not the half of the module
    assert torch.equal(model["tied"], values["weights"]["a.bias"]) and model["norm.running_mean"].tolist() == [1] * 3
    optimizer = contents.optimizers["optimizer"]
    assert optimizer.members == [["a.weight", "a.bias"], ["b.weight"]]
    assert [group["weight_decay"] for group in optimizer.groups] == [0.01, 0.0]
    for name, state in optimizer.state.items():
        assert torch.equal(state["exp_avg"], values["m"][name]) and torch.equal(state["exp_avg_sq"], values["v"][name])
        assert state["step"] == 7
    assert contents.schedulers["scheduler"].state == {"last_epoch": 7} and contents.extra == {"best_accuracy": 0.5}
    assert "'skipped_steps' of DeepSpeed's own" in contents.left
    options = {"kind": "six-key", "force": False, "weights_only": False, "model": "model", "config": None}
    words = argparse.Namespace(input=tmp_path / "ds", output=tmp_path / "out.pt", shard_bytes=1, **options)
    ckpt_convert.convert(words)
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for group in SHAPES for shape in group.values()]
    adam = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
    adam.load_state_dict(loaded["optimizer_state_dict"])
    assert torch.equal(adam.state[parameters[2]]["exp_avg"], values["m"]["b.weight"])


def test_zero_3_weights(tmp_path: pathlib.Path) -> None:
    values, ranks = zero_values()["weights"], 2
    tmp_path = tmp_path / "tag"
    tmp_path.mkdir()
    main = {"module": {}, "buffer_names": [], "param_shapes": shapes(), "shared_params": {}, "global_steps": 1}
    torch.save(main, tmp_path / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    for rank in range(ranks):
        pieces = []
        for tensor in values.values():
            flat = torch.cat([tensor.flatten(), torch.zeros(tensor.numel() % ranks)])
            pieces.append(flat.chunk(ranks)[rank])
        state = {"zero_stage": 3, "partition_count": ranks, "fp32_flat_groups": [torch.cat(pieces)]}
        torch.save({"optimizer_state_dict": state}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    contents = read(tmp_path)
    for name, tensor in values.items():
        assert torch.equal(contents.model()[name], tensor)
    assert contents.left == ["the optimizer's state: of stage 3 only weights are read"]


def test_deepspeed_folders_that_lack_something(tmp_path: pathlib.Path) -> None:
    def fresh(name: str) -> pathlib.Path:
        return write_zero(tmp_path / name, 1, 2, zero_values(), None)

    optimizer_file = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
    tag = fresh("missing")
    (tag / optimizer_file.format(1)).unlink()
    with pytest.raises(Refused, match="written by 2 ranks and has the files of 1"):
        read(tmp_path / "missing")
    tag = fresh("first")
    (tag / optimizer_file.format(0)).unlink()
    with pytest.raises(Refused, match="others are missing"):
        read(tmp_path / "first")
    tag = fresh("short")
    whole = torch.load(tag / optimizer_file.format(1), weights_only=True)
    groups = whole["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    groups[0] = groups[0][:-5]
    torch.save(whole, tag / optimizer_file.format(1))
    with pytest.raises(Refused, match="its parameters need 18"):
        read(tmp_path / "short")
    tag = fresh("parallel")
    (tag / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(Refused, match="tensor-parallel") as refused:
        read(tmp_path / "parallel")
    assert refused.value.code == 8
    fresh("elsewhere")
    (tmp_path / "elsewhere" / "latest").write_text("../missing/global_step7")
    with pytest.raises(Refused, match="no checkpoint that this knows"):
        read(tmp_path / "elsewhere")


def test_lightning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, other_library: Any) -> None:
    attributes = other_library("lightning.fabric.utilities.data", "AttributeDict", dict)
    parameters = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2)
    optimizer.step()
    whole = {
        "epoch": 4,
        "global_step": 120,
        "pytorch-lightning_version": "2.4.0",
        "state_dict": OrderedDict([("net.weight", parameters[0]), ("net.bias", parameters[1])]),
        "loops": {"fit_loop": {"state_dict": {}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_path": "/x"}},
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": attributes(lr=0.1),
    }
    torch.save(whole, tmp_path / "last.ckpt")
    forget(monkeypatch)
    contents = read(tmp_path / "last.ckpt")
    assert (contents.format, contents.step, contents.epoch) == ("Lightning", 120, 4)
    assert list(contents.model()) == ["net.weight", "net.bias"]
    state = contents.optimizers["optimizer"].state
    assert torch.equal(state[1]["momentum_buffer"], torch.full((3,), 2.0))
    assert [line.split("'")[1] for line in contents.left] == ["loops", "callbacks", "hparams_name", "hyper_parameters"]
