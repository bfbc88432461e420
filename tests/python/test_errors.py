"""Errors that the package itself makes are what the library's are."""

from __future__ import annotations

import pytest

import evenstep
from evenstep import _core
from evenstep.errors import error_of


def test_as_the_librarys() -> None:
    with pytest.raises(evenstep.EvenstepError) as told:
        _core.CheckpointWriter("/proc/self/there is none/a", True, 0)
    theirs = told.value
    words = f"{theirs} ".partition(f" ({theirs.status})")[0]
    ours = error_of(theirs.status, words, theirs.fix, theirs.rank)
    assert theirs.status.startswith("EVEN_ERR_") and theirs.fix
    assert (type(ours), str(ours), vars(ours)) == (type(theirs), str(theirs), vars(theirs))


def test_without_a_fix() -> None:
    ours = error_of("EVEN_ERR_PEER_LOST", "a rank was lost", rank=2)
    assert str(ours) == "a rank was lost (EVEN_ERR_PEER_LOST)"
    assert vars(ours) == {"status": "EVEN_ERR_PEER_LOST", "fix": None, "rank": 2, "device": None}


def test_one_made_in_words_alone() -> None:
    ours = evenstep.EvenstepError("words")
    assert (ours.status, ours.fix, ours.rank, ours.device) == ("", None, None, None)
