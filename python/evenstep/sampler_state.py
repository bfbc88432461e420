"""What a sampler of the user's keeps between epochs, so that a resumed run draws the samples that it would have drawn."""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import torch

from evenstep._core import EvenstepError


def save(owners: list[Any]) -> str:
    """The states of these samplers as text; "" where they keep none.

    A sampler with state_dict() and load_state_dict() says itself what its state is (plain JSON). Of others, the random
    number generators among their attributes are kept: random.Random, NumPy's Generator and RandomState, torch.Generator.
    torch's own samplers draw from generators that are seeded for each epoch, so they keep nothing.
    """
    states = [_state(owner) for owner in owners]
    return json.dumps(states) if any(states) else ""


def load(owners: list[Any], text: str) -> None:
    """Puts the samplers where `text` of save() left them. Errors: EvenstepError where they are not those of before."""
    if not text:
        return
    states = json.loads(text)
    if len(states) != len(owners):
        raise _other(owners)
    for owner, state in zip(owners, states):
        if "state_dict" in state:
            if not callable(getattr(owner, "load_state_dict", None)):
                raise _other([owner])
            owner.load_state_dict(state["state_dict"])
        for name, kept in state.items():
            if name != "state_dict" and not _put(getattr(owner, name, None), kept):
                raise _other([owner])


def _state(owner: Any) -> dict[str, Any]:
    if type(owner).__module__.startswith(("torch.utils.data", "evenstep.")):
        return {}
    if callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None)):
        state = owner.state_dict()
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise EvenstepError(
                f"the state_dict of the sampler {type(owner).__name__} cannot be kept in a checkpoint: {error}\n"
                "  fix: let it give numbers, strings, lists and dictionaries"
            ) from None
        return {"state_dict": state}
    found = {name: _get(value) for name, value in getattr(owner, "__dict__", {}).items() if name != "generator"}
    return {name: kept for name, kept in found.items() if kept is not None}


def _get(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return bytes(generator.get_state().tolist()).hex()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return _plain(generator.bit_generator.state)
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    return None


def _put(generator: Any, kept: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if isinstance(generator, random.Random):
        generator.setstate((kept[0], tuple(kept[1]), kept[2]))
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(list(bytes.fromhex(kept)), dtype=torch.uint8))
    elif numpy is not None and isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = _arrays(kept, generator.bit_generator.state)
    elif numpy is not None and isinstance(generator, numpy.random.RandomState):
        generator.set_state(_arrays(kept, generator.get_state(legacy=False)))
    else:
        return False
    return True


def _plain(state: Any) -> Any:
    """NumPy's state without arrays and NumPy's own numbers."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.tolist() if hasattr(state, "tolist") else state


def _arrays(kept: Any, like: Any) -> Any:
    """The reverse of _plain, by a state of the same kind."""
    if isinstance(like, dict):
        return {key: _arrays(kept[key], value) for key, value in like.items()}
    return type(like)(kept) if not hasattr(like, "dtype") else sys.modules["numpy"].array(kept, dtype=like.dtype)


def _other(owners: list[Any]) -> EvenstepError:
    names = ", ".join(type(owner).__name__ for owner in owners)
    return EvenstepError(
        f"the checkpoint holds the state of another sampler than this loader's ({names})\n"
        "  fix: resume with the sampler that the checkpoint was written with"
    )
