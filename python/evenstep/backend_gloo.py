"""Calls of torch's Gloo beneath: it takes memory as it lies. Where a tensor's elements do not lie one after the other, or do not mean
what they say, a copy goes in its place."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evenstep.backend_tensors import check_outputs, is_ours, landing, of_inference, plain, premultiplied
from evenstep.backend_work import LaterWork


def flat(given: Any) -> Iterator[torch.Tensor]:
    """The tensors of lists, or of lists of them."""
    if isinstance(given, torch.Tensor):
        yield given
        return
    for one in given:
        yield from flat(one)


def changed(given: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same lists of other tensors."""
    return change(given) if isinstance(given, torch.Tensor) else [changed(one, change) for one in given]


def _is_gloos(call: Callable[..., Any]) -> bool:
    return isinstance(getattr(call, "__self__", None), dist.ProcessGroupGloo)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor) if is_ours(tensor) else tensor


def _then_back(work: Any, copies: Sequence[tuple[torch.Tensor, torch.Tensor]], result: Any) -> Any:
    """The Work of a call that writes into the second of each two, which then goes into the first."""
    apart = [(tensor, copy) for tensor, copy in copies if copy is not tensor]
    if not apart:
        return work

    def back(done: Any) -> Any:
        done.value()  # raises what the call failed with
        with torch.inference_mode(of_inference(tensor for tensor, _ in apart)), torch.no_grad():
            for tensor, copy in apart:
                tensor.copy_(copy)
        return result

    return LaterWork(work.get_future().then(back), result)


def reading(call: Callable[..., Any], outputs: Any, inputs: Any, *rest: Any) -> Any:
    """`call(outputs, inputs, *rest)`, whose outputs Gloo copies from memory of its own. Of another backend: as it is."""
    return call(outputs, changed(inputs, _plain) if _is_gloos(call) else inputs, *rest)


def into(call: Callable[..., Any], outputs: Any, inputs: Any, *rest: Any) -> Any:
    """The Work of `call(outputs, inputs, *rest)`, which writes all of the outputs as they lie. Tensors, or lists of them."""
    if not _is_gloos(call):
        return call(outputs, inputs, *rest)
    tensors = list(flat(outputs))
    check_outputs(filter(is_ours, tensors))
    copies = {id(tensor): landing(tensor) if is_ours(tensor) else tensor for tensor in tensors}
    work = reading(call, changed(outputs, lambda tensor: copies[id(tensor)]), inputs, *rest)
    return _then_back(work, [(tensor, copies[id(tensor)]) for tensor in tensors], outputs)


def in_place(call: Callable[..., Any], tensors: Sequence[torch.Tensor], options: Any, here: bool = True) -> Any:
    """The Work of `call(tensors, *options)`, which writes where it has read. `here`: also on this rank; else they stay as they are."""
    gloos = _is_gloos(call)
    check_outputs(filter(is_ours, tensors if gloos else ()))
    with premultiplied(tensors, options, in_place=here) as (summed, said):
        copies = [_plain(tensor) if gloos else tensor for tensor in summed]
        work = call(copies, *said)
    return _then_back(work, list(zip(tensors, copies)) if gloos and here else (), tensors)
