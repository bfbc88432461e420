"""Which of two checkpoints is the newer, by what they know. Clocks jump, and those of two hosts differ: they are asked last.

`order` in a manifest's state is [turn, generation, number]. The turn is that of the attempt that wrote it among all that went
on with the training: an attempt's is greater than that of everything it goes on from, of everything in its folder, and of the
job's attempts before (src/orchestrator/resume.c). The generation is that of the ranks that trained (--recovery); the number
counts what one process has written. Manifests without it are older than those with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

_MOST = 9_999_999_999


def _numbers(state: dict[str, Any]) -> tuple[int, int, int]:
    order = state.get("order")
    if isinstance(order, list) and len(order) == 3 and all(type(n) is int and 0 <= n <= _MOST for n in order):
        return order[0], order[1], order[2]
    return 0, 0, 0


def order_of(manifest: dict[str, Any]) -> str:
    """The newer of two has the greater text. As src/checkpoint/manifest_reader.c has it: agents compare the two."""
    return f"{_text(*_numbers(manifest['state']))} {manifest['created']}"


def created_in(order: str) -> str:
    """Of such a text."""
    return order.rpartition(" ")[2]


def turn_after(found: Iterable[str]) -> int:
    """One that is greater than those of such texts."""
    return 1 + max((int(text[:10]) for text in found), default=0)


def begin_turn(session: Any, found: Callable[[], Iterable[str]]) -> None:
    """Before its session reads or writes any. found: gives the texts of what its folder has."""
    if session.turn == 0:
        told = os.environ.get("EVENSTEP_CHECKPOINT_TURN", "") if session.in_job else ""
        there = 0 if told.isdigit() and not session.name else turn_after(found())
        session.turn = max(int(told) if told.isdigit() else 1, there)


def follow(session: Any, state: dict[str, Any]) -> None:
    """The session goes on from a checkpoint: what it writes is newer."""
    turn, _, _ = _numbers(state)
    own = session.in_job and state.get("job") == os.environ.get("EVENSTEP_JOB", "") != ""
    session.turn = max(session.turn, turn if own else turn + 1)


def next_order(session: Any, newest: str) -> list[int]:
    """Of what the session writes now. newest: the text of the newest beside it; "": there is none."""
    session.number += 1
    recovery = session.recovery
    generation = 0 if recovery is None else int(recovery.number)
    if newest >= _text(session.turn, generation, session.number):
        session.turn = int(newest[:10]) + 1
    return [session.turn, generation, session.number]


def _text(turn: int, generation: int, number: int) -> str:
    return f"{turn:010d}.{generation:010d}.{number:010d}"
