"""Files that DeepSpeed and Lightning write, in their published layouts: read whole, with what cannot be carried listed."""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ckpt_samples import ckpt

from evenstep import ckpt_convert
from evenstep.convert_contents import Refused
from evenstep.convert_formats import is_replaceable, kind_of, read

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


def test_frozen_parameters_of_stage_1(tmp_path: pathlib.Path) -> None:
    """DeepSpeed has no fragments of them there: they are in the module alone, as is an integer."""
    tag = write_zero(tmp_path / "ds", 1, 2, zero_values(), None)
    main = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=True)
    main["module"]["frozen"], main["module"]["count"] = torch.full((2,), 0.5).half(), torch.tensor(3)
    torch.save(main, tag / "mp_rank_00_model_states.pt")
    model = read(tmp_path / "ds").model()
    assert list(model) == list(main["module"]) and model["count"].dtype == torch.int64 and model["count"] == 3
    assert torch.equal(model["frozen"], torch.full((2,), 0.5))


def test_states_that_are_not_of_the_weights_form_are_left(tmp_path: pathlib.Path) -> None:
    """As those of 8-bit optimizers: the weights come."""

    def changed(name: str, rank: int, by: Callable[[Any], Any]) -> pathlib.Path:
        place = tmp_path / name
        tag = place / "global_step7" if place.exists() else write_zero(place, 1, 2, zero_values(), None)
        file = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        whole = torch.load(file, weights_only=True)
        by(whole["optimizer_state_dict"]["base_optimizer_state"]["state"][0])
        torch.save(whole, file)
        return place

    def left(place: pathlib.Path, words: str) -> None:
        contents = read(place)
        assert not contents.optimizers and f"the optimizer's state: {words}" in contents.left
        assert torch.equal(contents.model()["a.weight"], zero_values()["weights"]["a.weight"])

    for rank in range(2):
        changed("8 bits", rank, lambda state: state.update(qmap1=torch.ones(256)))
        changed("rows", rank, lambda state: state.update(row=torch.ones(2, 2)))
    left(tmp_path / "8 bits", "'qmap1' has not as many values as its parameters")
    left(tmp_path / "rows", "'row' has not as many values as its parameters")
    for rank in range(2):
        left(
            changed(f"only {rank}", rank, lambda state: state.pop("exp_avg")),
            "'exp_avg' is in the files of some ranks alone",
        )
    place = changed("short", 1, lambda state: state.update(exp_avg=state["exp_avg"][:-5]))
    with pytest.raises(Refused, match="its parameters need 18"):
        read(place)


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
    tag = fresh("unnamed")
    (tag / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(Refused, match="the model's file is missing"):
        read(tmp_path / "unnamed")
    tag = fresh("parallel")
    (tag / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(Refused, match="tensor-parallel") as refused:
        read(tmp_path / "parallel")
    assert refused.value.code == 8
    fresh("elsewhere")
    (tmp_path / "elsewhere" / "latest").write_text("../missing/global_step7")
    with pytest.raises(Refused, match="no checkpoint that this knows"):
        read(tmp_path / "elsewhere")


def test_an_optimizer_of_fp16_without_zero_is_listed(tmp_path: pathlib.Path) -> None:
    flat = torch.ones(6)
    optimizer = {"optimizer_state_dict": {"state": {}, "param_groups": []}, "fp32_groups_flat": [flat], "cur_scale": 1}
    module = {"net.weight": torch.ones(2, 3).half()}
    torch.save(
        {"module": module, "optimizer": optimizer, "data_sampler": torch.ones(2)},
        tmp_path / "mp_rank_00_model_states.pt",
    )
    contents = read(tmp_path)
    assert contents.model()["net.weight"].dtype == torch.float16 and not contents.optimizers
    assert contents.left == [
        "'data_sampler' of DeepSpeed's own",
        "'optimizer' of DeepSpeed's own, and its fp32 weights, too: those are the module's",
    ]


class Net(torch.nn.Module):
    """With tied weights, buffers of two types and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)
        self.frozen, self.head = torch.nn.Linear(5, 5, bias=False), torch.nn.Linear(5, 1, bias=False)
        self.tied = torch.nn.Linear(3, 5, bias=False)
        self.tied.weight = self.a.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.norm(self.a(x) + self.tied(x))))  # type: ignore[no-any-return]


def trained(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """In two groups."""
    torch.manual_seed(5)
    model = Net()
    groups: list[dict[str, Any]] = [
        {"params": [model.a.weight, model.a.bias, model.head.weight]},
        {"params": [model.norm.weight, model.norm.bias], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, 0.1) if kind == "sgd" else torch.optim.AdamW(groups, 0.1, amsgrad=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def save_named(model: torch.nn.Module, optimizer: torch.optim.Optimizer, path: pathlib.Path) -> None:
    """As an optimizer of named parameters is saved."""
    state, names = optimizer.state_dict(), {id(p): name for name, p in model.named_parameters()}
    for saved, live in zip(state["param_groups"], optimizer.param_groups):
        saved["param_names"] = [names[id(p)] for p in live["params"]]
    scheduler = {"last_epoch": 3}
    entries = {"epoch": 2, "step": 30, "metrics": {}, "best": 0.25, "module": "taken"}
    torch.save(
        {
            "model_state_dict": model.state_dict(),
            "optimizer_state_dict": state,
            "scheduler_state_dict": scheduler,
            **entries,
        },
        path,
    )


def to_deepspeed(source: pathlib.Path, target: pathlib.Path, ranks: int | None, stage: int | None) -> dict[str, Any]:
    options = {"kind": "deepspeed", "force": False, "weights_only": False, "model": "model", "config": None}
    words = argparse.Namespace(input=source, output=target, shard_bytes=1, ranks=ranks, zero_stage=stage, **options)
    return ckpt_convert.convert(words)


@pytest.mark.parametrize(("kind", "ranks", "stage"), [("adam", 1, 1), ("adam", 3, 2), ("adam", 64, 2), ("sgd", 2, 1)])
def test_zero_1_and_2_written(tmp_path: pathlib.Path, kind: str, ranks: int, stage: int) -> None:
    model, optimizer = trained(kind)
    save_named(model, optimizer, tmp_path / "in.pt")
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", ranks, stage)
    assert told["left"] == ["'module' of the input's own entries: DeepSpeed has another of that name"]
    tag = tmp_path / "ds" / "global_step30"
    assert (tmp_path / "ds" / "latest").read_text() == tag.name
    files = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks)]
    assert sorted(path.name for path in tag.iterdir()) == sorted(["mp_rank_00_model_states.pt", *files])
    for rank, name in enumerate(files):  # equal pieces, padded to a multiple of twice the ranks
        state = torch.load(tag / name, weights_only=True)["optimizer_state_dict"]
        sizes = [-(-numbers // (2 * ranks)) * 2 for numbers in (15 + 5 + 5, 5 + 5)]
        assert [piece.shape for piece in state["single_partition_of_fp32_groups"]] == [(size,) for size in sizes]
        assert all(
            piece.untyped_storage().nbytes() == 4 * piece.numel() for piece in state["single_partition_of_fp32_groups"]
        )
        assert (state["zero_stage"], state["partition_count"]) == (stage, [ranks, ranks])
        padding = [sizes[0] * ranks - 25, sizes[1] * ranks - 10] if rank == ranks - 1 else [0, 0]
        assert state["group_paddings"] == padding
    contents = read(tmp_path / "ds")
    assert contents.format == f"DeepSpeed ZeRO stage {stage}, {ranks} ranks"
    assert (contents.step, contents.epoch, contents.extra) == (30, 2, {"best": 0.25, "metrics": {}})
    assert list(contents.model()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(contents.model()[name], tensor) and contents.model()[name].dtype == tensor.dtype, name
    back = contents.optimizers["optimizer"]
    assert [group["lr"] for group in back.groups] == [0.1, 0.5]
    names = dict(model.named_parameters())
    assert [[id(names[str(key)]) for key in group] for group in back.members] == [
        [id(p) for p in group["params"]] for group in optimizer.param_groups
    ]
    for key, values in back.state.items():
        for what, value in optimizer.state[names[str(key)]].items():
            assert torch.equal(values[what], value), (key, what)
    assert bool(back.state) == (kind == "adam")
    assert contents.schedulers["scheduler"].state == {"last_epoch": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_of_bf16_have_names_of_their_own(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """An engine of DeepSpeed's that is in bf16 looks for these alone."""
    torch.save({"w": torch.ones(3, dtype=dtype)}, tmp_path / "in.pt")
    to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", 1, 2)
    (name,) = (path.name for path in (tmp_path / "ds" / "global_step0").glob("*optim_states.pt"))
    assert name.startswith("bf16_zero_pp_rank_0" if dtype == torch.bfloat16 else "zero_pp_rank_0")
    assert torch.equal(read(tmp_path / "ds").model()["w"], torch.ones(3))


def test_what_deepspeed_has_no_place_for(tmp_path: pathlib.Path) -> None:
    model, optimizer = trained("adam")
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["step"] += 1
    save_named(model, optimizer, tmp_path / "in.pt")
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "uneven", 2, 1)
    assert any("'step' is not the same for all parameters" in line for line in told["left"])
    contents = read(tmp_path / "uneven")
    assert not contents.optimizers and torch.equal(contents.model()["head.weight"], model.state_dict()["head.weight"])
    optimizer.state.pop(first)
    save_named(model, optimizer, tmp_path / "in.pt")
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "without", None, None)
    assert "the optimizer has no state of a.weight: zeros stand for it" in told["notes"]
    back = read(tmp_path / "without")
    assert back.format == "DeepSpeed ZeRO stage 2, 1 ranks"
    assert not back.optimizers["optimizer"].state["a.weight"]["exp_avg"].any()
    torch.save(model.double().state_dict(), tmp_path / "weights.pt")
    told = to_deepspeed(tmp_path / "weights.pt", tmp_path / "weights", 4, 2)
    assert any("rounded to fp32" in note for note in told["notes"])
    assert torch.equal(read(tmp_path / "weights").model()["a.bias"], model.state_dict()["a.bias"].float())
    torch.save({"w": torch.ones(3, dtype=torch.int64)}, tmp_path / "integers.pt")
    with pytest.raises(Refused, match="no parameters"):
        to_deepspeed(tmp_path / "integers.pt", tmp_path / "none", 1, 1)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_group_without_any_state_gets_zeros(tmp_path: pathlib.Path, stage: int) -> None:
    model, optimizer = trained("adam")
    group = optimizer.param_groups[1]["params"]
    for parameter in group:
        optimizer.state.pop(parameter)
    save_named(model, optimizer, tmp_path / "in.pt")
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", 2, stage)
    names = [name for name, p in model.named_parameters() if any(p is one for one in group)]
    assert len(names) == 2
    back = read(tmp_path / "ds").optimizers["optimizer"]
    for name in names:
        assert f"the optimizer has no state of {name}: zeros stand for it" in told["notes"]
        assert set(back.state[name]) == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
        assert back.state[name]["step"] == 3
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            value = back.state[name][key]
            assert value.shape == model.get_parameter(name).shape and not value.any()
    assert back.state["a.weight"]["exp_avg"].any()
    optimizer.state.clear()
    save_named(model, optimizer, tmp_path / "in.pt")
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "none", 2, stage)
    assert not any("zeros" in note for note in told["notes"])
    assert not read(tmp_path / "none").optimizers["optimizer"].state


def test_a_deepspeed_folder_is_replaced_where_it_is_one_checkpoint(tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", 1, 1)
    assert is_replaceable(tmp_path / "ds")
    (tmp_path / "ds" / "global_step9").mkdir()
    assert not is_replaceable(tmp_path / "ds")


def test_files_of_optimizer_states_alone_make_no_folder_deepspeeds(tmp_path: pathlib.Path) -> None:
    """A folder with weights of another kind is read as that; one of other things is not replaced."""
    file = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    place = tmp_path / "hf"
    (place / "global_step5").mkdir(parents=True)
    torch.save({"w": torch.ones(3)}, place / "pytorch_model.bin")
    (place / "latest").write_text("global_step5")
    (place / "global_step5" / file).write_bytes(b"")
    assert kind_of(place) == "hf" and torch.equal(read(place).model()["w"], torch.ones(3))
    (place / file).write_bytes(b"")
    assert kind_of(place) == "hf"
    place = tmp_path / "things"
    (place / "letters").mkdir(parents=True)
    (place / file).write_bytes(b"")
    (place / "notes.txt").write_text("of years")
    assert not is_replaceable(place)
    with pytest.raises(Refused, match="the model's file is missing") as refused:
        kind_of(place)
    assert refused.value.code == 6
    (place / file).rename(place / "letters" / file)
    (place / "latest").write_text("letters")
    assert not is_replaceable(place)
    with pytest.raises(Refused, match=r"letters has neither .* the model's file is missing"):
        read(place)


def test_the_command_asks_for_ranks_of_deepspeed_alone(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "in.pt")
    words = ["convert", tmp_path / "in.pt", tmp_path / "out", "--ranks", 3, "--python", sys.executable]
    done = ckpt(program, *words, "--as", "dcp")
    assert done.returncode == 2 and "--as deepspeed" in done.stderr, done.stderr
    done = ckpt(program, *words, "--zero-stage", 4, "--as", "deepspeed")
    assert done.returncode == 2, done.stderr
    done = ckpt(program, *words, "--zero-stage", 1, "--as", "deepspeed")
    assert done.returncode == 0 and "for 3 ranks of ZeRO stage 1" in done.stdout, done.stderr
    assert read(tmp_path / "out").format == "DeepSpeed ZeRO stage 1, 3 ranks"


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
        "means": torch.zeros(3),
    }
    torch.save(whole, tmp_path / "last.ckpt")
    forget(monkeypatch)
    contents = read(tmp_path / "last.ckpt")
    assert (contents.format, contents.step, contents.epoch) == ("Lightning", 120, 4)
    assert list(contents.model()) == ["net.weight", "net.bias"]
    state = contents.optimizers["optimizer"].state
    assert torch.equal(state[1]["momentum_buffer"], torch.full((3,), 2.0))
    assert [line.split("'")[1] for line in contents.left] == [
        "loops", "callbacks", "hparams_name", "hyper_parameters", "means",
    ]  # fmt: skip
