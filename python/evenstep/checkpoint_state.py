"""What a checkpoint of a session holds and how it is put back: models, optimizers, schedulers, cursors, generators."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Callable

import torch
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from evenstep import _core, checkpoint_random
from evenstep._core import EvenstepError
from evenstep.checkpoint_block import move
from evenstep.checkpoint_encoding import decode, encode
from evenstep.checkpoint_files import find_tied, index_of, shard_name, total_bytes
from evenstep.checkpoint_homes import homes_in_model, homes_in_state
from evenstep.checkpoint_keeping import lineage_of, order_for
from evenstep.checkpoint_reading import StoredFiles, files_of, on_all_ranks
from evenstep.group import as_bytes

Tensors = dict[str, torch.Tensor]

# Names that no model's, optimizer's or scheduler's file has.
_RANDOM_FILE = "random.safetensors"
_OTHER_FILE = "state.safetensors"


class Snapshot:
    """State on its way to the disk: files of tensors, their metadata, and the JSON for the manifest."""

    def __init__(self) -> None:
        self.files: dict[str, Tensors] = {}
        self.metadata: dict[str, list[tuple[str, str]]] = {}
        self.tables: dict[str, bytes] = {}  # files that are no tensors: which shard has which
        self.state: dict[str, Any] = {}

    @cached_property
    def size(self) -> int:
        """Bytes of all tensors, once they are there."""
        return sum(total_bytes(tensors) for tensors in self.files.values())

    @cached_property
    def text(self) -> str:
        """The state in JSON, once it is whole."""
        return json.dumps(self.state, ensure_ascii=False, allow_nan=False)

    def detach(self) -> None:
        """Copies every tensor to host memory, so that training may go on while they are written."""
        for tensors in self.files.values():
            for name, tensor in tensors.items():
                tensors[name] = tensor.detach().to("cpu", copy=True)


def parameter_names(models: dict[str, Any]) -> dict[int, str]:
    """id of a parameter -> its name; those of a second model begin with "model_1:"."""
    names: dict[int, str] = {}
    for model_name, model in models.items():
        prefix = "" if model_name == "model" else f"{model_name}:"
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + name)
    return names


# -- models --

_LEAST_APART = 1 << 20  # bytes: less is written again, for less


def _save_model(name: str, model: Any, into: Snapshot) -> None:
    tensors: Tensors = {}
    other: Tensors = {}
    extra = {}
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            tensors[key] = value
        else:  # what get_extra_state gives
            extra[key] = encode(value, f"{name}/{key}", other)
    tied = find_tied(tensors)
    own = {key: value for key, value in tensors.items() if key not in tied}
    parts = _apart(model, own)
    files = [shard_name(name, i, len(parts)) for i in range(len(parts))]
    for file, part in zip(files, parts):
        into.files[file] = {key: own[key] for key in part}
        into.metadata[file] = [
            (key, of) for key, of in tied.items() if of in part
        ]  # as safetensors' load_model reads them
    into.files[_OTHER_FILE].update(other)
    into.state["models"][name] = {"file": files[0], "tied": tied, "extra": extra}
    if len(files) > 1:
        where = {key: file for file, part in zip(files, parts) for key in part}
        index = f"{name}.safetensors.index.json"
        into.tables[index] = index_of(where, total_bytes(own))
        into.state["models"][name].update(files=files, index=index)


def _apart(model: Any, tensors: Tensors) -> list[list[str]]:
    """Names by file: what is trained, and what is frozen, where that is worth a file of its own. A file that is as it was
    in the checkpoint before is not written again."""
    fixed = {key for key, parameter in model.named_parameters() if not parameter.requires_grad}
    frozen = [key for key in tensors if key in fixed]
    trained = [key for key in tensors if key not in fixed]
    size = sum(tensors[key].numel() * tensors[key].element_size() for key in frozen)
    return [trained, frozen] if trained and size >= _LEAST_APART else [list(tensors)]


_MOST_LISTED = 16  # of a kind: who has more wrong has another model


def _listed(items: Iterable[str]) -> str:
    texts = sorted(items)
    more = f" and {len(texts) - _MOST_LISTED} more" if len(texts) > _MOST_LISTED else ""
    return f"{', '.join(texts[:_MOST_LISTED])}{more}"


def _difference(what: str, missing: Iterable[str], unexpected: Iterable[str]) -> str:
    parts = []
    for kind, names in (("lacks", list(missing)), ("has, unknown here,", list(unexpected))):
        if names:
            parts.append(f"{kind} {_listed(names)}")
    return f"the checkpoint's {what} {'; it '.join(parts)}"


def _tensor_difference(key: str, saved: torch.Tensor, here: torch.Tensor) -> str:
    """ "" where they fit."""
    if isinstance(here, torch.nn.parameter.UninitializedTensorMixin):
        return ""
    if saved.shape != here.shape:
        return f"{key!r} has the shape {list(saved.shape)} in the checkpoint and {list(here.shape)} here"
    if saved.dtype != here.dtype:
        return f"{key!r} has the type {saved.dtype} in the checkpoint and {here.dtype} here"
    return ""


def _is_extra(key: str) -> bool:
    """What a module's get_extra_state gave: its own affair, whatever its form."""
    return key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX


def _tied_in(saved: dict[str, Any], here: dict[str, Any], own: Iterable[str]) -> dict[str, str]:
    """Keys that are not stored -> those whose tensors they share: as the checkpoint says, and as the model here has it, for a
    file of another library stores such a tensor once and does not say of whom else it is."""
    tied: dict[str, str] = dict(saved["tied"])
    first = find_tied({key: value for key, value in here.items() if isinstance(value, torch.Tensor)})
    stored = {first.get(key, key): key for key in here if key in own}
    for key in here:
        if key not in own and key not in tied and first.get(key, key) in stored:
            tied[key] = stored[first.get(key, key)]
    return tied


def _check_model(name: str, model: Any, saved: dict[str, Any], files: StoredFiles) -> None:
    """All that does not fit is told at once: names, shapes, types."""
    here, extra = model.state_dict(), saved["extra"]
    told = []
    own = files.tensors(files_of(saved))
    tied = _tied_in(saved, here, own)
    there = {*own, *(key for key, source in tied.items() if source in own), *extra}
    if there != set(here):
        told.append(_difference(f"model {name!r}", set(here) - there, there - set(here)))
    both = [key for key in here if key in there and key not in extra and not _is_extra(key)]
    tensors = [_tensor_difference(key, own[tied.get(key, key)], here[key]) for key in both]
    others = [text for text in tensors if text]
    if others:
        told.append(f"model {name!r}: tensor {_listed(others)}")
    if told:
        only_types = len(told) == 1 and bool(others) and all("has the type" in text for text in others)
        fix = "convert the model to that type before es.prepare" if only_types else ""
        text = "; ".join(told)
        raise EvenstepError(f"{text}\n  fix: {fix or 'build the model as it was when the checkpoint was written'}")


def _load_model(model: Any, saved: dict[str, Any], files: StoredFiles, other: Any) -> None:
    here, extra = model.state_dict(), saved["extra"]
    own = files.tensors(files_of(saved))
    tied = _tied_in(saved, here, own)
    files.drop(files_of(saved))
    state = {
        key: decode(extra[key], other, value) if key in extra else own[tied.get(key, key)]
        for key, value in here.items()
    }
    _put_in_place(model, state, extra)
    model.load_state_dict(state)


def _put_in_place(model: Any, state: dict[str, Any], extra: Any) -> None:
    """Copies what is plain memory by several threads. The model gets these tensors as its own then, and copies nothing more:
    what its modules do when they are loaded they do all the same."""
    if torch.__future__.get_swap_module_params_on_conversion():
        return
    live = model.state_dict(keep_vars=True)
    keys = [key for key in state if key not in extra and not _is_extra(key) and isinstance(live.get(key), torch.Tensor)]
    for key, done in zip(keys, move([(live[key], state[key]) for key in keys])):
        if done:
            state[key] = live[key]


# -- optimizers --


def _groups_of(optimizer: Any, state: dict[str, Any], names: dict[int, str]) -> list[list[tuple[int, str, Any]]]:
    """For each parameter group: (index in the state_dict, name, parameter)."""
    groups = []
    for g, (group, live) in enumerate(zip(state["param_groups"], optimizer.param_groups)):
        groups.append(
            [
                (index, names.get(id(parameter), f"group{g}.{i}"), parameter)
                for i, (index, parameter) in enumerate(zip(group["params"], live["params"]))
            ]
        )
    return groups


def _has_torch_form(state: Any) -> bool:
    return isinstance(state, dict) and isinstance(state.get("state"), dict) and "param_groups" in state


def _save_optimizer(name: str, optimizer: Any, names: dict[int, str], into: Snapshot) -> None:
    state = optimizer.state_dict()
    tensors: Tensors = {}
    file = f"{name}.safetensors"
    saved: dict[str, Any] = {"file": file, "class": _class_name(optimizer)}
    if not _has_torch_form(state) or len(state["param_groups"]) != len(optimizer.param_groups):
        saved["whole"] = encode(state, name, tensors)
    else:
        groups = _groups_of(optimizer, state, names)
        indices = {index: key for group in groups for index, key, _ in group}
        saved["parameters"] = [[[key, list(parameter.shape)] for _, key, parameter in group] for group in groups]
        saved["groups"] = [
            {k: encode(v, f"{name}/group{g}/{k}", tensors) for k, v in group.items() if k not in _BY_PARAMETER}
            for g, group in enumerate(state["param_groups"])
        ]
        saved["state"] = {
            indices[index]: encode(value, f"{name}/{indices[index]}", tensors)
            for index, value in state["state"].items()
            if index in indices
        }
        # some optimizers keep entries that belong to no parameter
        saved["other"] = encode(
            {
                "keys": {k: v for k, v in state.items() if k not in ("state", "param_groups")},
                "state": {k: v for k, v in state["state"].items() if k not in indices},
            },
            f"{name}/other",
            tensors,
        )
    into.files[file] = tensors
    into.state["optimizers"][name] = saved


# A group's entries that follow its parameters' order: taken from the optimizer that loads.
_BY_PARAMETER = ("params", "param_names")


def _class_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _check_optimizer(
    name: str, optimizer: Any, names: dict[int, str], saved: dict[str, Any], files: StoredFiles
) -> None:
    if saved["class"] not in (None, _class_name(optimizer)):  # None: converted from a format that does not say
        raise EvenstepError(
            f"optimizer {name!r} was {saved['class']} when the checkpoint was written and is {_class_name(optimizer)} "
            "here\n  fix: use the same optimizer, or load the model alone: "
            "es.load_checkpoint(path, optimizers=False, schedulers=False)"
        )
    current = optimizer.state_dict()
    groups = [] if "whole" in saved else _groups_of(optimizer, current, names)
    if "whole" not in saved:
        _check_parameters(name, groups, saved["parameters"])
    _decode_optimizer(current, groups, saved, files)


def _decode_optimizer(
    current: dict[str, Any], groups: list[list[tuple[int, str, Any]]], saved: dict[str, Any], files: StoredFiles
) -> dict[str, Any]:
    """What its load_state_dict takes. Copies no tensor, so that it may be tried before anything is put in place."""
    own = files.tensors(files_of(saved))

    def give(name: str) -> torch.Tensor:
        if name not in own:
            raise files.damage(f"{saved['file']} has no tensor {name!r}")
        return own[name]

    if "whole" in saved:
        return decode(saved["whole"], give, current)  # type: ignore[no-any-return]
    index_of = {key: index for group in groups for index, key, _ in group}
    strangers = [key for key in saved["state"] if key not in index_of]
    if strangers:
        raise files.damage(f"it has states of {_listed(strangers)}, which no group there has")
    other = decode(saved["other"], give)
    state = {index_of[key]: decode(value, give) for key, value in saved["state"].items()}
    param_groups = []
    for group, settings in zip(current["param_groups"], saved["groups"]):
        kept = {key: group[key] for key in _BY_PARAMETER if key in group}
        param_groups.append({**decode(settings, give, group), **kept})
    return {**other["keys"], "state": {**state, **other["state"]}, "param_groups": param_groups}


def _load_optimizer(optimizer: Any, names: dict[int, str], saved: dict[str, Any], files: StoredFiles) -> None:
    current = optimizer.state_dict()
    groups = [] if "whole" in saved else _groups_of(optimizer, current, names)
    whole = _decode_optimizer(current, groups, saved, files)
    files.drop(files_of(saved))
    optimizer.load_state_dict(whole)
    if groups:
        _keep_types(optimizer, groups, whole["state"])


def _check_parameters(name: str, groups: list[list[tuple[int, str, Any]]], saved: list[list[list[Any]]]) -> None:
    if len(groups) != len(saved):
        raise EvenstepError(
            f"optimizer {name!r} had {len(saved)} parameter groups when the checkpoint was written and has "
            f"{len(groups)} here\n  fix: make the same groups"
        )
    for g, (group, wanted) in enumerate(zip(groups, saved)):
        here = {key: list(parameter.shape) for _, key, parameter in group}
        there = dict(wanted)
        if set(here) != set(there):
            text = _difference(f"optimizer {name!r}, group {g},", set(here) - set(there), set(there) - set(here))
            raise EvenstepError(f"{text}\n  fix: give the optimizer the same parameters in the same groups")
        for key, shape in there.items():
            if here[key] != shape:
                raise EvenstepError(
                    f"optimizer {name!r}: parameter {key!r} has the shape {shape} in the checkpoint and {here[key]} "
                    "here\n  fix: build the model as it was when the checkpoint was written"
                )


def _keep_types(optimizer: Any, groups: list[list[tuple[int, str, Any]]], saved: dict[int, Any]) -> None:
    """torch casts loaded state to its parameter's type; state that was kept wider (fp32 for bf16) stays so."""
    for group in groups:
        for index, _, parameter in group:
            loaded = optimizer.state.get(parameter)
            values = saved.get(index)
            if not isinstance(values, dict) or not isinstance(loaded, dict):
                continue
            for key, value in values.items():
                now = loaded.get(key)
                if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dtype != value.dtype:
                    loaded[key] = value.to(now.device)


# -- the whole --


def _object_names(objects: dict[str, Any]) -> dict[str, Any]:
    for name in objects:
        if "/" in name or name in ("", ".", "..", "random", "state", "manifest"):
            raise EvenstepError(f"a checkpoint cannot name an object {name!r}")
    return objects


def capture(session: Any, random_states: list[bytes], extra: Any) -> Snapshot:
    """Everything that training needs to go on; references to the live tensors (see Snapshot.detach)."""
    into = Snapshot()
    into.files[_OTHER_FILE] = {}
    into.files[_RANDOM_FILE] = {}
    into.state = {
        "lineage": lineage_of(session),
        "order": order_for(session),  # which of two is the newer (evenstep.checkpoint_order)
        "process_set": session.name,
        "job": os.environ.get("EVENSTEP_JOB", "") if session.in_job else "",  # by which its agent knows its own
        "step": int(session.step),
        "epoch": int(session.epoch),
        "world_size": int(session.world_size),
        "seed": torch.initial_seed() & ((1 << 63) - 1),
        "versions": {"evenstep": _core.version, "torch": torch.__version__, "python": platform.python_version()},
        "models": {},
        "optimizers": {},
        "schedulers": {},
        "loaders": {},
        "objects": {},
        "random": {},
    }
    names = parameter_names(session.models)
    for name, model in _object_names(session.models).items():
        _save_model(name, model, into)
    for name, optimizer in _object_names(session.optimizers).items():
        _save_optimizer(name, optimizer, names, into)
    other = into.files[_OTHER_FILE]
    for name, scheduler in session.schedulers.items():
        state = scheduler.state_dict()
        into.state["schedulers"][name] = {"class": _class_name(scheduler), "state": encode(state, name, other)}
    for name, loader in _trained(session.loaders).items():
        into.state["loaders"][name] = encode(loader.state_dict(), f"loaders/{name}", other)
    for name, one in session.objects.items():
        state = encode(one.state_dict(), f"objects/{name}", other)
        into.state["objects"][name] = {"class": _class_name(one), "state": state}
    into.state["exchange"] = encode(session.exchange_state, "exchange", other)
    into.state["extra"] = encode(extra, "extra", other)
    for rank, packed in enumerate(random_states):
        into.state["random"][str(rank)] = _unpack_random(packed, rank, into.files[_RANDOM_FILE])
    if not other:
        del into.files[_OTHER_FILE]
    return into


def pack_random(pending: Callable[[], None] | None) -> bytes:
    """This rank's random state, for the rank that writes. pending: sets what the next batch will find."""
    state, tensors = checkpoint_random.capture() if pending is None else checkpoint_random.capture_after(pending)
    raw = [as_bytes(one.contiguous()) for one in tensors.values()]
    kinds = [[name, str(one.dtype).split(".")[1], len(it)] for (name, one), it in zip(tensors.items(), raw)]
    head = json.dumps([state, kinds]).encode()
    return b"".join((len(head).to_bytes(8, "little"), head, *raw))


def _unpack_random(packed: bytes, rank: int, tensors: Tensors) -> Any:
    at = 8 + int.from_bytes(packed[:8], "little")
    state, kinds = json.loads(packed[8:at])
    for name, dtype, size in kinds:
        values = bytearray(packed[at : at + size])
        tensors[f"rank{rank}/{name}"] = torch.frombuffer(values, dtype=getattr(torch, dtype))
        at += size
    return state


def load_random(files: StoredFiles, state: dict[str, Any], rank: int) -> Callable[[], None]:
    """Gives the call that puts this rank's generators where they were, or, for a rank that was not there, where seed,
    rank and step say."""
    mine = state["random"].get(str(rank))
    if mine is None:
        return lambda: checkpoint_random.derive(state["seed"], rank, state["step"])
    prefix = f"rank{rank}/"
    stored = files.tensors([_RANDOM_FILE]).items()
    tensors = {name[len(prefix) :]: tensor for name, tensor in stored if name.startswith(prefix)}
    files.drop([_RANDOM_FILE])
    return lambda: checkpoint_random.restore(mine, tensors.__getitem__)


_WITH_FILES = ("models", "optimizers")
KINDS = ("models", "optimizers", "schedulers", "loaders", "objects")
Wanted = tuple[str, str, Any, Any]  # its kind, its name, the object, what was saved of it


class Loader:
    """Puts a checkpoint's state back into a session's objects, each once. What does not fit is an error."""

    def __init__(self, session: Any, folder: Any, manifest: dict[str, Any]) -> None:
        """folder: a checkpoint's, or what a living rank gave (evenstep.generation_gift)."""
        self.files = StoredFiles(folder, manifest) if isinstance(folder, Path) else folder.stored
        self._session = session
        self._folder = folder
        self.manifest, self._state = manifest, manifest["state"]
        self._other = self.files.tensor_of(_OTHER_FILE)
        self._seen = self.files.tensor_of(_OTHER_FILE, copy=False)  # to try what is decoded, before it is put in place
        self._done: set[tuple[str, str]] = set()

    def extra(self) -> Any:
        """What the user saved with it."""
        return decode(self._state["extra"], self._other)

    def exchange(self) -> dict[str, Any]:
        """What the ranks' exchange of gradients remembered."""
        return decode(self._state.get("exchange", {}), self._other)  # type: ignore[no-any-return]

    def _saved(self, kind: str) -> dict[str, Any]:
        saved: dict[str, Any] = self._state.get(kind, {})  # older checkpoints have no objects
        return saved

    def has_loaded(self, kind: str, name: str) -> bool:
        return (kind, name) in self._done

    def read_first(self, random: bool) -> None:
        """Collective: reads what has no object of its own, before anything is put in place."""
        names = [_OTHER_FILE] if _OTHER_FILE in self.files else []
        if random and str(self._session.rank) in self._state["random"]:
            names.append(_RANDOM_FILE)
        on_all_ranks(self._session, lambda: self.files.read(names))

    def _to_load(self, kind: str) -> list[tuple[str, Any, Any]]:
        saved = self._saved(kind)
        live = getattr(self._session, kind).items()
        return [(name, one, saved[name]) for name, one in live if name in saved and (kind, name) not in self._done]

    def load(self, kinds: Iterable[str], later: bool = False) -> None:
        """Collective. Loads what is prepared and not yet loaded, nothing where one of it does not fit. later: more is to be
        prepared, so that an optimizer whose model is not there yet may wait, and so may a model that the checkpoint does not know."""
        self.put(self.read(kinds, later))

    def read(self, kinds: Iterable[str], later: bool = False, rest: bool = False) -> list[Wanted]:
        """Collective. What `load` puts in place, read and compared on all ranks. rest: what is left out has to be right, too."""
        names = parameter_names(self._session.models)
        wanted = [
            (kind, name, live, saved)
            for kind in KINDS
            if kind in kinds
            for name, live, saved in self._to_load(kind)
            if not (later and kind == "optimizers" and not _all_named(live, names))
        ]

        def read_and_check() -> None:
            if isinstance(self._folder, Path):
                self.files.expect(_homes_of(wanted, names))
            self.files.read(name for kind, _, _, saved in wanted if kind in _WITH_FILES for name in files_of(saved))
            for kind, name, live, saved in wanted:
                getattr(self, f"_check_{kind}")(name, live, saved, names)
            if rest:
                self.files.check_rest()

        if wanted or rest:
            on_all_ranks(self._session, read_and_check)
        return wanted

    def put(self, wanted: Sequence[Wanted]) -> None:
        """In place, on this rank, which meets no other here: who is lost now is missed when all have their state."""
        names = parameter_names(self._session.models)
        # what runs code of others, which may still refuse, comes first
        for kind in reversed(KINDS):
            some = [one[1:] for one in reversed(wanted) if one[0] == kind]
            if kind in _WITH_FILES:
                self.files.fill(file for _, _, saved in some for file in files_of(saved))
            for name, live, saved in some:
                getattr(self, f"_load_{kind}")(live, saved, names)
                self._done.add((kind, name))

    def load_objects_again(self) -> None:
        """A script that came by what it had done before the checkpoint (`early.step()` after each epoch of a `range` loop)
        has done it to them once more."""
        for kind, name in self._done:
            if kind == "objects":
                self._load_objects(self._session.objects[name], self._saved(kind)[name], {})

    def check_complete(self, kinds: Iterable[str]) -> None:
        """The script must have prepared what the checkpoint holds, no more and no less."""
        for kind in kinds:
            live = _trained(getattr(self._session, kind)) if kind == "loaders" else getattr(self._session, kind)
            saved = self._saved(kind)
            if kind == "loaders" and not self._has_positions(live, saved):
                continue
            if kind == "objects" and not self._has_objects(live):
                continue
            if set(live) != set(saved):
                raise EvenstepError(
                    f"this script prepared the {kind} {sorted(live) or 'none'}, the checkpoint has "
                    f"{sorted(saved) or 'none'}\n  fix: give es.prepare the same {kind} in the same order, "
                    f"or leave them out: es.load_checkpoint(path, {kind}=False)"
                )

    def _has_positions(self, live: dict[str, Any], saved: dict[str, Any]) -> bool:
        """Outside a job loaders are the user's own and have no data position, neither to save nor to go to."""
        if not self._session.in_job:
            return False
        if live and not saved and self._session.rank == 0:
            sys.stderr.write(
                f"evenstep: {self._folder} holds no data position (it was written outside a job, or without a loader): "
                "the data begin with epoch 0\n"
            )
        return bool(saved)

    def _has_objects(self, live: dict[str, Any]) -> bool:
        """Checkpoints of before objects were kept say nothing of them."""
        if live and "objects" not in self._state and self._session.rank == 0:
            sys.stderr.write(
                f"evenstep: {self._folder} is of a version that kept no other objects: {', '.join(sorted(live))} begin as "
                "the script made them\n"
            )
        return "objects" in self._state

    def _check_models(self, name: str, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        _check_model(name, live, saved, self.files)
        decode(saved["extra"], self._seen)

    def _load_models(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        _load_model(live, saved, self.files, self._other)

    def _check_optimizers(self, name: str, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        _check_optimizer(name, live, names, saved, self.files)

    def _load_optimizers(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        _load_optimizer(live, names, saved, self.files)

    def _check_schedulers(self, name: str, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        _check_class("scheduler", name, live, saved)
        decode(saved["state"], self._seen)

    def _load_schedulers(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        live.load_state_dict(decode(saved["state"], self._other, live.state_dict()))

    def _check_objects(self, name: str, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        _check_class("object", name, live, saved)
        decode(saved["state"], self._seen)

    def _load_objects(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        state = decode(saved["state"], self._other, live.state_dict())
        try:
            live.load_state_dict(state)
        except Exception as error:  # code of others
            raise EvenstepError(
                f"the {saved['class']} does not take the state that it had when the checkpoint was written: "
                f"{type(error).__name__}: {error}\n  fix: build it as it was then, or load without: "
                "es.load_checkpoint(path, objects=False)"
            ) from error

    def _check_loaders(self, name: str, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        live.check_state_dict(decode(saved, self._other))

    def _load_loaders(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        live.load_state_dict(decode(saved, self._other))


def _check_class(kind: str, name: str, live: Any, saved: dict[str, Any]) -> None:
    if saved["class"] not in (None, _class_name(live)):
        raise EvenstepError(
            f"{kind} {name!r} was {saved['class']} when the checkpoint was written and is {_class_name(live)} "
            f"here\n  fix: use the same {kind}, or load without: es.load_checkpoint(path, {kind}s=False)"
        )


def _homes_of(wanted: list[tuple[str, str, Any, Any]], names: dict[int, str]) -> dict[str, Tensors]:
    """By file: memory that is there for its tensors."""
    found: dict[str, Tensors] = {}
    for kind, _, live, saved in wanted:
        if kind == "models":
            found.update(dict.fromkeys(files_of(saved), homes_in_model(live)))
        elif kind == "optimizers" and "whole" not in saved:
            state, homes = live.state_dict(), Tensors()
            groups = _groups_of(live, state, names) if _has_torch_form(state) else []
            for index, key, _ in (one for group in groups for one in group):
                homes.update(homes_in_state(saved["state"].get(key), state["state"].get(index)))
            found.update(dict.fromkeys(files_of(saved), homes))
    return found


def _all_named(optimizer: Any, names: dict[int, str]) -> bool:
    return all(id(p) in names for group in optimizer.param_groups for p in group["params"])


def _trained(loaders: dict[str, Any]) -> dict[str, Any]:
    """Loaders with a data position worth keeping: those of evaluation start anew each time."""
    return {
        name: loader
        for name, loader in loaders.items()
        if getattr(loader, "train", True) and hasattr(loader, "state_dict")
    }
