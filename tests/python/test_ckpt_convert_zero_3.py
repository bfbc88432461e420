"""Folders of DeepSpeed's ZeRO 3: read in its published layout, written, and refused where something is missing."""

from __future__ import annotations

import math
import pathlib
import subprocess
import sys
from collections import OrderedDict
from typing import Any, Callable

import pytest
import torch
from ckpt_samples import ckpt
from test_ckpt_convert_others import forget, other_library, save_named, to_deepspeed, trained  # noqa: F401

from evenstep import convert_deepspeed_writer
from evenstep.convert_contents import Contents, Refused
from evenstep.convert_formats import read
from evenstep.convert_torch import load_safely

GROUPS = [{"a.weight": (3, 5), "a.bias": (3,)}, {"b.weight": (2, 2)}, {"c": ()}]  # vectors
FROZEN = {"f.weight": (5, 2), "f.none": (0, 4)}
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def shapes() -> dict[str, tuple[int, ...]]:
    return {name: shape for group in GROUPS for name, shape in group.items()}


def values_of(shift: float) -> dict[str, torch.Tensor]:
    return {
        name: (torch.arange(math.prod(shape)).float() + shift + 100 * i).reshape(shape)
        for i, (name, shape) in enumerate(shapes().items())
    }


def pieces_of(tensor: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """Filled up with what is no value of the tensor's."""
    flat = tensor.flatten()
    return list(torch.cat([flat, torch.full((-len(flat) % ranks,), -1.0)]).reshape(ranks, -1))


def vector(values: dict[str, torch.Tensor], group: dict[str, Any], rank: int, ranks: int) -> torch.Tensor:
    return torch.cat([pieces_of(values[name], ranks)[rank] for name in group])


def all_values() -> dict[str, dict[str, torch.Tensor]]:
    return {"weights": values_of(0.125), "m": values_of(1000), "v": values_of(2000)}


def write_zero_3(folder: pathlib.Path, ranks: int, stage: Any = 3, scaler: Any = None) -> pathlib.Path:
    """Of two groups of the optimizer, the second of which has two vectors."""
    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    values = all_values()
    frozen = {name: torch.arange(math.prod(shape)).half().reshape(shape) for name, shape in FROZEN.items()}
    names = [*shapes(), *FROZEN]
    for rank in range(ranks):
        module = OrderedDict((name, torch.empty(0, dtype=torch.half)) for name in [*names, "tied"])
        module["norm.running_mean"] = torch.ones(3).half()
        main = {
            "module": module,
            "buffer_names": ["norm.running_mean"],
            "optimizer": None,
            "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in g.items()) for g in GROUPS],
            "frozen_param_shapes": OrderedDict((name, torch.Size(shape)) for name, shape in FROZEN.items()),
            "frozen_param_fragments": OrderedDict((n, pieces_of(t, ranks)[rank].half()) for n, t in frozen.items()),
            "shared_params": {"tied": "a.bias"} if rank == 0 else {},
            "lr_scheduler": {"last_epoch": 7},
            "global_steps": 7,
            "skipped_steps": 0,
            "dp_world_size": ranks,
            "ds_version": "0.19.8",
        }
        torch.save(main, tag / MODEL.format(rank))
        state = {
            i: {
                "step": torch.tensor(7.0),
                "exp_avg": vector(values["m"], group, rank, ranks),
                "exp_avg_sq": vector(values["v"], group, rank, ranks),
            }
            for i, group in enumerate(GROUPS)
        }
        groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1, 2]}]
        flat = [vector(values["weights"], group, rank, ranks).requires_grad_() for group in GROUPS]
        for one in flat:
            one.ds_id = "0_1"  # type: ignore[attr-defined]
        zero = {
            "zero_stage": stage,
            "loss_scaler": scaler,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": state, "param_groups": groups},
            "fp32_flat_groups": flat,
        }
        torch.save({"optimizer_state_dict": zero, "ds_version": "0.19.8"}, tag / OPTIMIZER.format(rank))
    return tag


def change(path: pathlib.Path, by: Callable[[dict[str, Any]], Any]) -> None:
    whole = torch.load(path, weights_only=True)
    by(whole)
    torch.save(whole, path)


def optimizer_of(contents: Contents) -> Any:
    return contents.optimizers["optimizer"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_it_is_read_with_its_states(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    other_library: Any,  # noqa: F811
    ranks: int,
) -> None:
    """Of five ranks and more, a vector has one value: it is none that all parameters share."""
    scaler = other_library("deepspeed.runtime.fp16.loss_scaler", "LossScaler")()
    stage = other_library("deepspeed.runtime.zero.config", "ZeroStageEnum", int)(3)
    write_zero_3(tmp_path / "ds", ranks, stage, scaler)
    forget(monkeypatch)
    contents = read(tmp_path / "ds")
    assert contents.format == f"DeepSpeed ZeRO stage 3, {ranks} ranks" and contents.step == 7
    model, values = contents.model(), all_values()
    assert list(model) == [*shapes(), *FROZEN, "tied", "norm.running_mean"]
    for name, tensor in values["weights"].items():
        assert torch.equal(model[name], tensor) and not model[name].requires_grad, name
    assert torch.equal(model["f.weight"], torch.arange(10).half().reshape(5, 2))
    assert model["f.none"].shape == (0, 4) and model["f.weight"].dtype == torch.half
    assert torch.equal(model["tied"], values["weights"]["a.bias"]) and model["norm.running_mean"].tolist() == [1] * 3
    optimizer = optimizer_of(contents)
    assert optimizer.members == [["a.weight", "a.bias"], ["b.weight", "c"]]
    assert optimizer.groups == [{"lr": 0.1}, {"lr": 0.2}]
    assert list(optimizer.state) == list(shapes())
    for name, state in optimizer.state.items():
        assert torch.equal(state["exp_avg"], values["m"][name]) and torch.equal(state["exp_avg_sq"], values["v"][name])
        assert torch.equal(state["step"], torch.tensor(7.0))
    assert contents.left == ["'dp_world_size' of DeepSpeed's own", "'ds_version' of DeepSpeed's own"]


def test_states_that_are_not_there(tmp_path: pathlib.Path) -> None:
    tag = write_zero_3(tmp_path / "gone", 2)
    change(tag / OPTIMIZER.format(1), lambda whole: whole["optimizer_state_dict"].pop("optimizer_state_dict"))
    contents = read(tmp_path / "gone")
    assert not contents.optimizers and "the optimizer's state: it is not in the files" in contents.left
    assert torch.equal(contents.model()["b.weight"], all_values()["weights"]["b.weight"])
    tag = write_zero_3(tmp_path / "other", 2)

    def regroup(whole: dict[str, Any]) -> None:
        whole["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"][1]["params"] = [1]

    change(tag / OPTIMIZER.format(0), regroup)
    contents = read(tmp_path / "other")
    assert "the optimizer's state: its groups are not those of the weights" in contents.left
    tag = write_zero_3(tmp_path / "untied", 2)
    change(tag / MODEL.format(0), lambda whole: whole["shared_params"].clear())
    contents = read(tmp_path / "untied")
    assert "tied: no file has its values" in contents.left and "tied" not in contents.model()
    tag = write_zero_3(tmp_path / "some", 2)
    for rank in range(2):
        change(
            tag / OPTIMIZER.format(rank),
            lambda whole: whole["optimizer_state_dict"]["optimizer_state_dict"]["state"].pop(1),
        )
    assert list(optimizer_of(read(tmp_path / "some")).state) == ["a.weight", "a.bias", "c"]


def test_states_of_other_forms_are_left(tmp_path: pathlib.Path) -> None:
    """As those of 8-bit optimizers, and what was swapped out: weights come, and the optimizer does not, not in part."""

    def left(by: Callable[[Any], Any], ranks: tuple[int, ...] = (0, 1)) -> str:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        tag = write_zero_3(place, 2)
        for rank in ranks:
            change(
                tag / OPTIMIZER.format(rank),
                lambda whole: by(whole["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]),
            )
        contents = read(place)
        assert not contents.optimizers
        for name, tensor in all_values()["weights"].items():
            assert torch.equal(contents.model()[name], tensor), name
        (words,) = (line for line in contents.left if line.startswith("the optimizer's state: "))
        return words.removeprefix("the optimizer's state: ")

    assert left(lambda s: s.update(qmap1=torch.ones(256))) == "'qmap1' has not as many values as its parameters"
    assert left(lambda s: s.update(row=torch.ones(1, 2))) == "'row' has not as many values as its parameters"
    some = "'exp_avg' is in the files of some ranks alone"
    assert left(lambda s: s.pop("exp_avg"), (0,)) == some and left(lambda s: s.pop("exp_avg"), (1,)) == some
    gone = "'exp_avg' has no values in the files"
    assert left(lambda s: s.update(exp_avg=torch.empty(0))) == gone
    assert left(lambda s: s.update(exp_avg=torch.empty(0)), (1,)) == gone


def test_files_that_are_missing(tmp_path: pathlib.Path) -> None:
    def without(name: str, file: str) -> pathlib.Path:
        tag = write_zero_3(tmp_path / name, 3)
        (tag / file).unlink()
        return tag

    def refused(name: str, words: str) -> None:
        with pytest.raises(Refused, match=words) as error:
            read(tmp_path / name)
        assert error.value.code == 6

    without("last", OPTIMIZER.format(2))
    refused("last", "written by 3 ranks and has the files of 2")
    without("middle", OPTIMIZER.format(1))
    refused("middle", r"files of ranks \[0, 2\]: others are missing")
    tag = without("all", OPTIMIZER.format(0))
    for rank in (1, 2):
        (tag / OPTIMIZER.format(rank)).unlink()
    refused("all", "no files of optimizer states")
    without("first model", MODEL.format(0))
    refused("first model", "the model's file is missing")
    tag = without("second model", MODEL.format(1))
    refused("second model", "rank_1_mp_rank_00_model_states.pt is not there: it has rank 1's pieces of frozen")
    change(tag / MODEL.format(0), lambda whole: whole.update(frozen_param_shapes=None, frozen_param_fragments=None))
    contents = read(tmp_path / "second model")  # without frozen parameters nothing is missing
    assert "f.weight: no file has its values" in contents.left and len(contents.model()) == len(shapes()) + 2


def test_sizes_that_do_not_add_up(tmp_path: pathlib.Path) -> None:
    def refused(words: str, by: Callable[[Any], Any], ranks: tuple[int, ...] = (0, 1), file: str = OPTIMIZER) -> None:
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        tag = write_zero_3(place, 2)
        for rank in ranks:
            change(tag / file.format(rank), by)
        with pytest.raises(Refused, match=words) as error:
            read(place)
        assert error.value.code == 6

    def zero(by: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda whole: by(whole["optimizer_state_dict"])

    def cut(zero: Any) -> None:
        zero["fp32_flat_groups"][1] = zero["fp32_flat_groups"][1][:-1]

    def extend(zero: Any) -> None:
        zero["fp32_flat_groups"][2] = torch.zeros(3)

    def shorten(key: str) -> Callable[[Any], Any]:
        def by(zero: Any) -> None:
            state = zero["optimizer_state_dict"]["state"][0]
            state[key] = state[key][:-1]

        return by

    refused(r"rank 1 has vectors of \[10, 1, 1\] values, rank 0 of \[10, 2, 1\]", zero(cut), (1,))
    refused("'b.weight' needs 2 values of each rank, whose vector has 1 more", zero(cut))
    refused("each rank has 15 values, its parameters need 13", zero(extend))
    refused("rank 0 has no 'fp32_flat_groups'", zero(lambda zero: zero.pop("fp32_flat_groups")))
    refused("rank 1 has no 'fp32_flat_groups'", zero(lambda zero: zero.update(fp32_flat_groups=[1, 2])), (1,))
    refused(r"'exp_avg' of rank 1 is of shape \(9,\), of rank 0 \(10,\)", zero(shorten("exp_avg")), (1,))
    refused(
        "'c' needs 1 values of each rank, whose vector has 0 more", zero(lambda zero: zero["fp32_flat_groups"].pop())
    )
    refused("'f.weight'", lambda whole: whole["frozen_param_fragments"].pop("f.weight"), (1,), MODEL)
    refused("not 5 values of the frozen", lambda whole: whole.update(frozen_param_fragments=None), (0,), MODEL)
    short = {"f.weight": torch.ones(4), "f.none": torch.empty(0)}
    refused("not 5 values of the frozen", lambda whole: whole.update(frozen_param_fragments=short), (1,), MODEL)
    huge = {"a.weight": torch.Size((3, 1 << 60))}
    refused("whose vector has 10 more", lambda whole: whole["param_shapes"][0].update(huge), (0,), MODEL)


def test_what_is_not_known_is_refused(tmp_path: pathlib.Path) -> None:
    tag = write_zero_3(tmp_path / "ds", 1)
    name = tag / OPTIMIZER.format(0)
    change(name, lambda whole: whole["optimizer_state_dict"].update(ds_zero_partition_groups=[{"sub_group": 0}]))
    with pytest.raises(Refused, match="experts") as refused:
        read(tag)
    assert refused.value.code == 8
    change(name, lambda whole: whole["optimizer_state_dict"].update(zero_stage=4))
    with pytest.raises(Refused, match="stage 4, which this does not know") as refused:
        read(tag)
    assert refused.value.code == 8

    def empty(whole: dict[str, Any]) -> None:
        del whole["optimizer_state_dict"]["ds_zero_partition_groups"]
        whole["optimizer_state_dict"].update(zero_stage=3, fp32_flat_groups=[torch.empty(0) for _ in GROUPS])

    change(name, empty)
    with pytest.raises(Refused, match=r"'a\.weight' needs 15 values") as refused:
        read(tag)
    assert "offloaded to a disk" in refused.value.fix


# -- written --


def input_of(tmp_path: pathlib.Path, kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(kind)
    model.to(dtype)
    save_named(model, optimizer, tmp_path / "in.pt")
    return model, optimizer


def check_back(contents: Contents, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights and states bit by bit, in the model's order and the optimizer's groups."""
    names = dict(model.named_parameters())
    assert list(contents.model()) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        back = contents.model()[name]
        dtype = tensor.dtype if name == "frozen.weight" or not tensor.is_floating_point() else torch.float32
        assert back.dtype == dtype and torch.equal(back, tensor.to(dtype)), name
    back = optimizer_of(contents)
    assert [[id(names[str(key)]) for key in group] for group in back.members] == [
        [id(p) for p in group["params"]] for group in optimizer.param_groups
    ]
    assert [group["lr"] for group in back.groups] == [0.1, 0.5]
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"] if optimizer.state[p]]
    assert len(back.state) == len(states)
    for key, state in back.state.items():
        assert set(state) == set(optimizer.state[names[str(key)]])
        for what, value in optimizer.state[names[str(key)]].items():
            assert torch.equal(state[what], value) and state[what].dtype == value.dtype, (key, what)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kind", "ranks"), [("adam", 1), ("adam", 2), ("adam", 3), ("adam", 64), ("sgd", 2)])
def test_what_is_written_is_read_back(tmp_path: pathlib.Path, kind: str, ranks: int, dtype: torch.dtype) -> None:
    model, optimizer = input_of(tmp_path, kind, dtype)
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", ranks, 3)
    assert told["left"] == ["'module' of the input's own entries: DeepSpeed has another of that name"]
    assert (
        f"for {ranks} rank{'s' if ranks > 1 else ''} of ZeRO stage 3; frozen parameters there: frozen.weight"
        in told["notes"]
    )
    contents = read(tmp_path / "ds")
    assert contents.format == f"DeepSpeed ZeRO stage 3, {ranks} ranks"
    assert (contents.step, contents.epoch, contents.extra) == (30, 2, {"best": 0.25, "metrics": {}})
    assert contents.schedulers["scheduler"].state == {"last_epoch": 3}
    check_back(contents, model, optimizer)
    assert torch.equal(contents.model()["tied.weight"], contents.model()["a.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_files_are_as_deepspeed_has_them(tmp_path: pathlib.Path, ranks: int, dtype: torch.dtype) -> None:
    model, optimizer = input_of(tmp_path, "adam", dtype)
    to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", ranks, 3)
    tag = tmp_path / "ds" / "global_step30"
    bf16 = "bf16_" if dtype == torch.bfloat16 else ""  # an engine in bf16 looks for these names alone
    files = [name for rank in range(ranks) for name in (MODEL.format(rank), bf16 + OPTIMIZER.format(rank))]
    assert sorted(path.name for path in tag.iterdir()) == sorted(files)
    tensors, names = model.state_dict(), {id(p): name for name, p in model.named_parameters()}
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    named = dict(model.named_parameters())

    def padded(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        flat = tensor.detach().flatten()
        return torch.cat([flat, flat.new_zeros(-len(flat) % ranks)]).reshape(ranks, -1)[rank]

    for rank in range(ranks):
        main = torch.load(tag / MODEL.format(rank), weights_only=True)
        assert list(main["module"]) == list(tensors)
        apart = [name for name, tensor in main["module"].items() if tensor.shape == (0,)]
        assert apart == [
            "a.weight",
            "a.bias",
            "norm.weight",
            "norm.bias",
            "frozen.weight",
            "head.weight",
            "tied.weight",
        ]
        assert all(main["module"][name].dtype == tensor.dtype for name, tensor in tensors.items())
        assert main["buffer_names"] == [f"norm.{x}" for x in ("running_mean", "running_var", "num_batches_tracked")]
        assert [list(group.items()) for group in main["param_shapes"]] == [
            [(name, tensors[name].shape) for name in group] for group in members
        ]
        assert main["frozen_param_shapes"] == {"frozen.weight": (5, 5)}
        assert torch.equal(main["frozen_param_fragments"]["frozen.weight"], padded(tensors["frozen.weight"], rank))
        assert main["shared_params"] == {"tied.weight": "a.weight"}
        assert (main["dp_world_size"], main["mp_world_size"], main["ds_version"]) == (ranks, 1, "0.16.0")
        whole = load_safely(tag / (bf16 + OPTIMIZER.format(rank)))
        zero = whole["optimizer_state_dict"]
        assert (zero["zero_stage"], zero["partition_count"], whole["ds_version"]) == (3, ranks, "0.16.0")
        assert zero["overflow"] is False and zero["dynamic_loss_scale"] is False
        assert [group["params"] for group in zero["optimizer_state_dict"]["param_groups"]] == [[0], [1]]
        for i, group in enumerate(members):
            flat = zero["fp32_flat_groups"][i]
            assert flat.dtype == torch.float32 and flat.untyped_storage().nbytes() == 4 * flat.numel()
            assert torch.equal(flat, torch.cat([padded(tensors[name].float(), rank) for name in group]))
            state = zero["optimizer_state_dict"]["state"][i]
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                wanted = torch.cat([padded(optimizer.state[named[name]][key], rank) for name in group])
                assert torch.equal(state[key], wanted), key
            assert state["step"] == 3 and state["step"].dim() == 0


def test_large_groups_have_several_vectors(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As DeepSpeed makes them: whole parameters, until so many values of a rank are together."""
    monkeypatch.setattr(convert_deepspeed_writer, "_MOST_VALUES", 8)
    model, optimizer = input_of(tmp_path, "adam", torch.float32)
    to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", 2, 3)
    tag = tmp_path / "ds" / "global_step30"
    main = torch.load(tag / MODEL.format(0), weights_only=True)
    assert [list(group) for group in main["param_shapes"]] == [
        ["a.weight"],
        ["a.bias", "head.weight"],
        ["norm.weight", "norm.bias"],
    ]
    zero = load_safely(tag / OPTIMIZER.format(1))["optimizer_state_dict"]
    assert [len(one) for one in zero["fp32_flat_groups"]] == [8, 6, 6]
    assert [group["params"] for group in zero["optimizer_state_dict"]["param_groups"]] == [[0, 1], [2]]
    check_back(read(tmp_path / "ds"), model, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_its_class_of_loss_scales_is_named(
    tmp_path: pathlib.Path,
    other_library: Any,  # noqa: F811
    dtype: torch.dtype,
) -> None:
    """DeepSpeed takes the object that is in the file."""
    input_of(tmp_path, "sgd", dtype)
    to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", 1, 3)
    name = "DynamicLossScaler" if dtype == torch.float16 else "LossScaler"
    kind = other_library("deepspeed.runtime.fp16.loss_scaler", name)
    whole = torch.load(tmp_path / "ds" / "global_step30" / OPTIMIZER.format(0), weights_only=False)
    scaler = whole["optimizer_state_dict"]["loss_scaler"]
    assert type(scaler) is kind and scaler.cur_scale == (65536 if dtype == torch.float16 else 1)
    assert whole["optimizer_state_dict"]["dynamic_loss_scale"] == scaler.dynamic == (dtype == torch.float16)


def test_weights_alone_and_what_has_no_values(tmp_path: pathlib.Path) -> None:
    tensors = {"w": torch.randn(7), "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "count": torch.tensor(3)}
    torch.save(tensors, tmp_path / "in.pt")
    told = to_deepspeed(tmp_path / "in.pt", tmp_path / "ds", 3, 3)
    assert "empty has no values, and so none in the optimizer there" in told["notes"]
    contents = read(tmp_path / "ds")
    assert not contents.optimizers and list(contents.model()) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(contents.model()[name], tensor), name
    torch.save({"empty": torch.empty(0)}, tmp_path / "empty.pt")
    with pytest.raises(Refused, match="no parameters"):
        to_deepspeed(tmp_path / "empty.pt", tmp_path / "none", 1, 3)


def test_a_tied_parameter_that_the_optimizer_has_under_its_second_name(tmp_path: pathlib.Path) -> None:
    weight = torch.randn(3, 2)
    group = {"params": [0], "param_names": ["second"], "lr": 0.1}
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3, 2)}}, "param_groups": [group]}
    model = {"first": weight, "second": weight, "third": weight}
    torch.save({"model_state_dict": model, "optimizer_state_dict": state}, tmp_path / "in.pt")
    for stage in (2, 3):
        place = tmp_path / f"ds{stage}"
        to_deepspeed(tmp_path / "in.pt", place, 2, stage)
        main = torch.load(next((place / "global_step0").glob("*model_states.pt")), weights_only=True)
        assert main["shared_params"] == {"first": "second", "third": "second"} and not main["buffer_names"]
        contents = read(place)
        assert list(contents.model()) == ["first", "second", "third"]
        assert all(torch.equal(tensor, weight) for tensor in contents.model().values())
        assert optimizer_of(contents).members == [["second"]]


def test_the_note_names_eight_frozen_ones(tmp_path: pathlib.Path) -> None:
    optimizer = {"state": {}, "param_groups": [{"params": [0], "param_names": ["w"], "lr": 0.1}]}
    for count in (8, 9):
        model = {"w": torch.ones(2), **{f"f{i}": torch.ones(3) for i in range(count)}}
        torch.save({"model_state_dict": model, "optimizer_state_dict": optimizer}, tmp_path / "in.pt")
        told = to_deepspeed(tmp_path / "in.pt", tmp_path / f"ds{count}", 1, 3)
        words = "frozen parameters there: f0, f1, f2, f3, f4, f5, f6, f7" + (" and 1 more" if count == 9 else "")
        assert any(note.endswith(words) for note in told["notes"])


def test_of_several_trained_ones_the_first_is_named(tmp_path: pathlib.Path) -> None:
    """The same in every run: a set's order of strings is not."""
    weight = torch.randn(3)
    names = [f"trained{i}" for i in range(20)]
    optimizer = {"state": {}, "param_groups": [{"params": list(range(20)), "param_names": names, "lr": 0.1}]}
    model = dict.fromkeys(["before", *names, "after"], weight)
    torch.save({"model_state_dict": model, "optimizer_state_dict": optimizer}, tmp_path / "in.pt")
    for stage in (2, 3):
        place = tmp_path / f"ds{stage}"
        to_deepspeed(tmp_path / "in.pt", place, 1, stage)
        main = torch.load(next((place / "global_step0").glob("*model_states.pt")), weights_only=True)
        assert main["shared_params"] == {"before": "trained0", "after": "trained0"}


def test_the_command_writes_it(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    torch.save({"w": torch.ones(5)}, tmp_path / "in.pt")

    def convert(source: str, target: str, *words: object) -> subprocess.CompletedProcess[str]:
        return ckpt(program, "convert", tmp_path / source, tmp_path / target, *words, "--python", sys.executable)

    done = convert("in.pt", "ds", "--as", "deepspeed", "--ranks", 3, "--zero-stage", 3)
    assert done.returncode == 0, done.stderr
    assert "for 3 ranks of ZeRO stage 3; frozen parameters there: none" in done.stdout
    done = convert("ds", "back.pt")
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "back.pt", weights_only=True)["model_state_dict"]["w"], torch.ones(5))
    (tmp_path / "ds" / "global_step0" / OPTIMIZER.format(2)).unlink()
    done = convert("ds", "again.pt")
    assert done.returncode == 6 and "written by 3 ranks and has the files of 2" in done.stderr, done.stderr
