"""Copies of a model that were made before es.prepare (a teacher, an average of weights, a target network, clones of all
parameters): on one device they have the model's first values, so on ranks that are seeded differently they get rank 0's, as
the model does."""

from __future__ import annotations

import gc
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from evenstep.group import Group, broadcast_bytes, gather_objects

_Named = list[tuple[str, torch.Tensor]]


def _tensors(module: nn.Module) -> _Named:
    return [*module.named_parameters(), *module.named_buffers()]


def _kept(model: nn.Module) -> set[str]:
    """The names of the tensors of its state_dict(), without asking it, which may run code of the script's."""
    left_out = {
        f"{path}.{name}" if path else name
        for path, part in model.named_modules(remove_duplicate=False)
        for name in part._non_persistent_buffers_set
    }
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name for name, _ in named} - left_out


def _first_ones(values: Iterable[torch.Tensor]) -> bytes:
    """Of each tensor one number: what is drawn by chance differs there, too."""
    strided = (one for one in values if one.layout is torch.strided and one.numel() > 0)
    found = [one.detach().flatten()[:1].cpu().view(torch.uint8) for one in strided]
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


def _are_copies(copies: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> bool:
    """Whether all of these have the bits of those, apart from them, and something of it was drawn."""
    pairs = list(zip(copies, values))
    return (
        all((a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device) for a, b in pairs)
        and all(_is_plain(a) and a.data_ptr() != b.data_ptr() for a, b in pairs if b.numel() > 0)
        and all(torch.equal(a, b) for a, b in pairs)
        and any(_is_drawn(a) for a in copies)
    )


def _in_words(thing: object) -> _Named:
    """What a module, or a list, tuple or dictionary of tensors alone, holds; nothing where it is none of these."""
    if issubclass(type(thing), nn.Module):
        try:
            return _tensors(thing)  # type: ignore[arg-type]
        except Exception:  # a module of the script's that is half made, or answers otherwise
            return []
    if type(thing) in (list, tuple):
        named = [("", one) for one in thing]  # type: ignore[attr-defined]
    elif type(thing) in (dict, OrderedDict):
        named = sorted(thing.items(), key=lambda item: str(item[0]))  # type: ignore[attr-defined]
    else:
        return []
    return named if all(issubclass(type(one), torch.Tensor) for _, one in named) else []


class CopiedValues:
    """Made before the models get rank 0's values; `follow()` after it. Collective: rank 0 says what it begins with, and
    only where that is another somewhere all look for copies, through all objects that Python knows, some hundredths of a
    second. A copy is a module with the bits of all that the model, or a module in it, has, or a list, tuple or dictionary
    with those of all its parameters, or of its state_dict(). Where rank 0 has not as many of one, they are left as they are
    (it has read weights, say, after the copy was made). `others`: models whose values are their own, and their parts."""

    def __init__(self, group: Group, models: Iterable[nn.Module], others: Iterable[nn.Module] = ()) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        given = list(models)
        if group.ranks == 1 or not given:
            return
        mine = _first_ones(one for model in given for _, one in _tensors(model))
        differs = broadcast_bytes(group, mine) != mine
        if any(gather_objects(group, differs)):
            found = self._find(given, {id(part) for model in (*given, *others) for part in model.modules()})
            counts = Counter(place for place, _ in found)
            first = dict(gather_objects(group, sorted(counts.items()))[0])
            for place, pairs in found:
                if first.get(place) == counts[place]:
                    self.pairs += pairs

    @torch.no_grad()
    def _find(
        self, models: list[nn.Module], known: set[int]
    ) -> list[tuple[int, list[tuple[torch.Tensor, torch.Tensor]]]]:
        """Each copy: the number of what it is one of, the same on all ranks, and its tensors beside that one's."""
        forms: dict[tuple[str, ...], list[tuple[int, list[torch.Tensor]]]] = {}
        places = 0
        for model in models:
            parts = [_tensors(part) for part in model.modules()]
            whole: _Named = list(model.named_parameters())
            clones: _Named = [("", one) for _, one in whole]
            kept = _kept(model)
            tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
            state = sorted((one for one in tensors if one[0] in kept), key=lambda one: one[0])
            for named in (*parts, sorted(whole, key=lambda one: one[0]), clones, state):
                names = tuple(name for name, _ in named)
                forms.setdefault(names, []).append((places, [one for _, one in named]))
                places += 1
        longest = max(map(len, forms))
        found = []
        for thing in gc.get_objects():
            if id(thing) in known or (type(thing) in (list, tuple, dict, OrderedDict) and len(thing) > longest):
                continue
            named = _in_words(thing)
            for place, values in forms.get(tuple(name for name, _ in named), ()) if named else ():
                copies = [one for _, one in named]
                if _are_copies(copies, values):
                    found.append((place, list(zip(copies, values))))
                    break
        return found

    @torch.no_grad()
    def follow(self) -> None:
        """The copies get what the models have now; what does not differ between ranks is not written to."""
        for other, copied in self.pairs:
            if not torch.equal(other, copied):
                other.detach().copy_(copied)
        self.pairs.clear()
