"""Errors that the package itself finds, as complete as those that the library gives."""

from __future__ import annotations

from typing import TypeVar

from evenstep._core import EvenstepError

E = TypeVar("E", bound=EvenstepError)


def error_of(status: str, what: str, fix: str | None = None, rank: int | None = None) -> EvenstepError:
    """As error_as, of no kind of its own."""
    return error_as(EvenstepError, status, what, fix, rank)


def error_as(kind: type[E], status: str, what: str, fix: str | None = None, rank: int | None = None) -> E:
    """Of a status by its whole name ("EVEN_ERR_PEER_LOST"), in the words and with the attributes of an error of the library's;
    `rank`: the one that it is about."""
    error = kind(f"{what} ({status})" + (f"\n  fix: {fix}" if fix is not None else ""))
    error.status, error.fix, error.rank, error.device = status, fix, rank, None
    return error


def words_of(error: BaseException) -> str:
    """What is told of it on all ranks: errors of the script's own objects say little without their type."""
    if isinstance(error, EvenstepError):
        return str(error)
    return ": ".join(filter(None, (type(error).__name__, str(error))))
