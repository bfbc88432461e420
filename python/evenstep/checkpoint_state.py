"""What a checkpoint of a session holds and how it is put back: models, optimizers, schedulers, cursors, generators."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Callable

import torch

from evenstep import _core, checkpoint_random
from evenstep._core import EvenstepError
from evenstep.checkpoint_encoding import decode, encode, tensor_names
from evenstep.checkpoint_homes import homes_in_model, homes_in_state
from evenstep.checkpoint_keeping import lineage_of, order_for
from evenstep.checkpoint_models import check_model, load_model, parameter_names, save_model
from evenstep.checkpoint_optimizers import (
    check_optimizer,
    class_name,
    groups_of,
    has_torch_form,
    load_optimizer,
    save_optimizer,
)
from evenstep.checkpoint_reading import StoredFiles, files_of, on_all_ranks
from evenstep.checkpoint_snapshot import OTHER_FILE, RANDOM_FILE, Snapshot, Tensors
from evenstep.exchange_state import put_inner_state
from evenstep.group import as_bytes


def _object_names(objects: dict[str, Any]) -> dict[str, Any]:
    for name in objects:
        if "/" in name or name in ("", ".", "..", "random", "state", "manifest"):
            raise EvenstepError(f"a checkpoint cannot name an object {name!r}")
    return objects


def capture(session: Any, random_states: list[bytes], extra: Any) -> Snapshot:
    """Everything that training needs to go on; references to the live tensors (see Snapshot.detach)."""
    into = Snapshot()
    into.files[OTHER_FILE] = {}
    into.files[RANDOM_FILE] = {}
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
        save_model(name, model, into)
    for name, optimizer in _object_names(session.optimizers).items():
        save_optimizer(name, optimizer, names, into)
    other = into.files[OTHER_FILE]
    for name, scheduler in session.schedulers.items():
        state = scheduler.state_dict()
        into.state["schedulers"][name] = {"class": class_name(scheduler), "state": encode(state, name, other)}
    for name, loader in _trained(session.loaders).items():
        into.state["loaders"][name] = encode(loader.state_dict(), f"loaders/{name}", other)
    for name, one in session.objects.items():
        state = encode(one.state_dict(), f"objects/{name}", other)
        into.state["objects"][name] = {"class": class_name(one), "state": state}
    into.state["exchange"] = encode(session.exchange_state, "exchange", other)
    into.state["extra"] = encode(extra, "extra", other)
    for rank, packed in enumerate(random_states):
        into.state["random"][str(rank)] = _unpack_random(packed, rank, into.files[RANDOM_FILE])
    if not other:
        del into.files[OTHER_FILE]
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
    stored = files.tensors([RANDOM_FILE]).items()
    tensors = {name[len(prefix) :]: tensor for name, tensor in stored if name.startswith(prefix)}
    files.drop([RANDOM_FILE])
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
        self.files.pass_over(OTHER_FILE, self._of_other_ranks())
        self._other = self.files.tensor_of(OTHER_FILE)
        self._seen = self.files.tensor_of(OTHER_FILE, copy=False)  # to try what is decoded, before it is put in place
        self._done: set[tuple[str, str]] = set()
        self.wanted: list[Wanted] = []  # of the last `read`

    def extra(self) -> Any:
        """What the user saved with it."""
        return decode(self._state["extra"], self._other)

    def exchange(self) -> dict[str, Any]:
        """What the ranks' exchange of gradients remembered; where as many ranks wrote it as there are, of the others nothing."""
        return decode(self._of_this_rank(self._state.get("exchange", {})), self._other)  # type: ignore[no-any-return]

    def _of_this_rank(self, saved: Any) -> Any:
        """Encoded states, those of the other ranks left out where this one has its own."""
        if not isinstance(saved, dict):
            return saved
        ranks = saved.get("ranks")
        if not isinstance(ranks, list):
            return {key: self._of_this_rank(one) for key, one in saved.items()}
        if len(ranks) == self._session.world_size:
            ranks = [one if rank == self._session.rank else {} for rank, one in enumerate(ranks)]
        return {**saved, "ranks": ranks}

    def _of_other_ranks(self) -> set[str]:
        """Tensors that `exchange` leaves out here."""
        saved = self._state.get("exchange", {})
        return tensor_names(saved) - tensor_names(self._of_this_rank(saved))

    def _inner_state(self, name: str) -> dict[str, Any] | None:
        found = self._of_this_rank(self._state.get("exchange", {}).get("optimizers", {}).get(name))
        return decode(found, self._other)  # type: ignore[no-any-return]

    def _saved(self, kind: str) -> dict[str, Any]:
        saved: dict[str, Any] = self._state.get(kind, {})  # older checkpoints have no objects
        return saved

    def has_loaded(self, kind: str, name: str) -> bool:
        return (kind, name) in self._done

    def read_first(self, random: bool) -> None:
        """Collective: reads what has no object of its own, before anything is put in place."""
        names = [OTHER_FILE] if OTHER_FILE in self.files else []
        if random and str(self._session.rank) in self._state["random"]:
            names.append(RANDOM_FILE)
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

        self.wanted = wanted
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
                if kind == "optimizers":
                    put_inner_state(self._session, name, live, self._inner_state(name))
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
        check_model(name, live, saved, self.files)
        decode(saved["extra"], self._seen)

    def _load_models(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        load_model(live, saved, self.files, self._other)

    def _check_optimizers(self, name: str, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        check_optimizer(name, live, names, saved, self.files)

    def _load_optimizers(self, live: Any, saved: dict[str, Any], names: dict[int, str]) -> None:
        load_optimizer(live, names, saved, self.files)

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
    if saved["class"] not in (None, class_name(live)):
        raise EvenstepError(
            f"{kind} {name!r} was {saved['class']} when the checkpoint was written and is {class_name(live)} "
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
            groups = groups_of(live, state, names) if has_torch_form(state) else []
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
