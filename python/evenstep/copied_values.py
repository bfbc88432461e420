"""Copies of a model that were made before es.prepare (a teacher, an average of weights, a target network, clones of all
parameters): on one device they have the model's first values, so on ranks that are seeded differently they get rank 0's, as
the model does."""

from __future__ import annotations

import gc
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from evenstep.group import Group, broadcast_bytes, gather_objects

_Named = list[tuple[str, torch.Tensor]]
_Pair = tuple[torch.Tensor, torch.Tensor]


def _by_name(named: Iterable[tuple[str, torch.Tensor]]) -> _Named:
    return sorted(named, key=lambda one: one[0])


def _tensors(module: nn.Module) -> _Named:
    return [*module.named_parameters(), *module.named_buffers()]


def _state(model: nn.Module) -> _Named:
    """The tensors of its state_dict(), without asking it, which may run code of the script's."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, part in model.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [one for one in named if one[0] not in left_out]


def _first_ones(values: Iterable[torch.Tensor]) -> bytes:
    """Of each tensor one number: what is drawn by chance differs there, too."""
    strided = (one for one in values if one.layout is torch.strided and one.numel() > 0)
    found = [
        one.detach().flatten()[:1].cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)
        for one in strided
    ]
    return bytes(torch.cat(found).tolist()) if found else b""


def _is_drawn(tensor: torch.Tensor) -> bool:
    """Whether it looks drawn by chance: zeros, ones and counters are alike in models that have nothing else in common."""
    return tensor.numel() > 1 and bool((tensor != tensor.flatten()[0]).any())


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is memory of torch's own that may be written to: not a file's, not freed, no subclass that makes of a
    comparison whatever it likes."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        return False
    storage = tensor.untyped_storage()
    whole = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() <= storage.nbytes()
    return whole and storage.resizable() and tensor.is_contiguous() and not tensor.is_inference()


def _are_copies(copies: Sequence[torch.Tensor], values: Sequence[torch.Tensor], theirs: set[int]) -> bool:
    """Whether all of these have the bits of those, in other memory than `theirs`, and something of it was drawn."""
    pairs = list(zip(copies, values))
    return (
        all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs)
        and all(_is_plain(a) and a.untyped_storage().data_ptr() not in theirs for a in copies if a.numel() > 0)
        and all(torch.equal(a, b) for a, b in pairs)
        and any(_is_drawn(a) for a in copies)
    )


def _named(thing: object, lengths: set[int]) -> _Named:
    """What a module, or a list, tuple or dictionary of so many tensors and nothing else, holds; nothing where it is none."""
    kind = type(thing)
    if issubclass(kind, nn.Module):
        try:
            return _tensors(thing)  # type: ignore[arg-type]
        except Exception:  # a module of the script's that is half made, or answers otherwise
            return []
    if kind not in (list, tuple, dict, OrderedDict) or len(thing) not in lengths:  # type: ignore[arg-type]
        return []
    by_name = kind in (dict, OrderedDict)
    values: Iterable[Any] = thing.values() if by_name else thing  # type: ignore[attr-defined, assignment]
    if not all(issubclass(type(one), torch.Tensor) for one in values):
        return []
    if not by_name:
        return [("", one) for one in thing]  # type: ignore[attr-defined]
    names_it = all(type(name) is str for name in thing)  # type: ignore[attr-defined]
    return _by_name(thing.items()) if names_it else []  # type: ignore[attr-defined]


class CopiedValues:
    """Made before the models get rank 0's values; `follow()` after it. Collective: rank 0 says what it begins with, and
    only where that is another somewhere all look for copies, through all objects that Python knows: some tenths of a
    second. A copy is a module with the bits of all that the model, or a module in it, has, or a list, tuple or dictionary
    with those of all its parameters, or of its state_dict(), in memory of its own. Where rank 0 has fewer of one, nobody
    knows which of them those are, and they are left as they are, with a warning; where it has none, without one: it has
    read weights, say, after the copy was made. `others`: models whose values are their own, and their parts."""

    def __init__(self, group: Group, models: Iterable[nn.Module], others: Iterable[nn.Module] = ()) -> None:
        self.pairs: list[_Pair] = []
        given = list(models)
        if group.ranks == 1 or not given:
            return
        mine = _first_ones(one for model in given for _, one in _tensors(model))
        differs = broadcast_bytes(group, mine) != mine
        if any(gather_objects(group, differs)):
            found = self._find(given, list(others))
            counts = Counter(place for place, _ in found)
            first = dict(gather_objects(group, sorted(counts.items()))[0])
            unsure = 0
            for place, pairs in found:
                if counts[place] <= first.get(place, 0):
                    self.pairs += pairs
                else:
                    unsure += place in first
            if unsure:
                warnings.warn(
                    f"of {unsure} copies of a model that this rank has, rank 0 has fewer, so which of them are to follow "
                    "rank 0's values is not known, and none does\n  fix: make copies on all ranks alike, or after "
                    "es.prepare, or seed all ranks alike before the model is made",
                    stacklevel=6,
                )

    @torch.no_grad()
    def _find(self, models: list[nn.Module], others: list[nn.Module]) -> list[tuple[str, list[_Pair]]]:
        """Each copy: what it is one of, in words that are the same on all ranks, and its tensors beside that one's."""
        forms: dict[tuple[str, ...], list[list[torch.Tensor]]] = {}
        numbers: dict[int, int] = {}
        for model in models:
            parts = [_tensors(part) for part in model.modules()]
            whole: _Named = list(model.named_parameters())
            clones: _Named = [("", one) for _, one in whole]
            for named in (*parts, _by_name(whole), clones, _by_name(_state(model))):
                forms.setdefault(tuple(name for name, _ in named), []).append([one for _, one in named])
            for _, one in _tensors(model):
                numbers.setdefault(id(one), len(numbers))
        theirs = {
            one.untyped_storage().data_ptr()
            for model in (*models, *others)
            for _, one in _tensors(model)
            if one.layout is torch.strided
        }
        lengths = set(map(len, forms)) - {0}
        candidates = []
        gc.collect()  # what nobody has any more counts on no rank
        for thing in gc.get_objects():
            named = _named(thing, lengths)
            for values in forms.get(tuple(name for name, _ in named), ()) if named else ():
                copies = [one for _, one in named]
                if _are_copies(copies, values, theirs):
                    candidates.append((copies, values))
        return _unique(candidates, numbers)

    @torch.no_grad()
    def follow(self) -> None:
        """The copies get what the models have now; what does not differ between ranks is not written to."""
        for other, copied in self.pairs:
            if not torch.equal(other, copied):
                other.detach().copy_(copied)
        self.pairs.clear()


def _unique(
    candidates: list[tuple[list[torch.Tensor], list[torch.Tensor]]], numbers: dict[int, int]
) -> list[tuple[str, list[_Pair]]]:
    """Each once: the largest first, for what is part of one is none by itself; not where several parts of the models have
    the same bits, and which of them it is a copy of nobody knows."""
    places: dict[tuple[int, ...], dict[str, list[_Pair]]] = {}
    for copies, values in candidates:
        pairs = sorted(zip(copies, values), key=lambda pair: numbers[id(pair[1])])
        place = ",".join(str(numbers[id(value)]) for _, value in pairs)
        places.setdefault(tuple(sorted(id(one) for one in copies)), {})[place] = pairs
    done: set[int] = set()
    found = []
    for ids, of in sorted(places.items(), key=lambda one: -len(one[0])):
        if len(of) == 1 and not done.issuperset(ids):
            found += list(of.items())
            done.update(ids)
    return found
