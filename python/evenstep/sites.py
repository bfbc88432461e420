"""Where in the user's program a collective was called: looked for only when one fails, so that it costs nothing before.
(On a GPU nobody is in the call when it fails: there it is said before each. So it is with each message that is sent, for its
sender may be far from there when it turns out not to fit.) What the engine asks for then is in python/ext/callers.c."""

from __future__ import annotations

import sys
import threading
import warnings
from types import CodeType, FrameType

# typing_extensions and warnings: torch's deprecated names (reduce_scatter_tensor) are wrapped in their functions.
_BENEATH = (  # read by python/ext/callers.c, too
    "torch",
    "evenstep",
    "threading",
    "concurrent",
    "contextlib",
    "typing_extensions",
    "warnings",
    "_py_warnings",
    "tqdm",  # which goes through a loader for the script
)

Place = tuple[str, int, str]
"""A file, a line, the name of the function."""


class _Submitted(threading.local):
    """The place of the call that this thread makes for another one."""

    place: Place | None = None


_submitted = _Submitted()


def _users(frame: FrameType | None) -> Place | None:
    """The first frame from here on outwards that is none of torch's, Python's threads' or ours."""
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BENEATH:
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def of_caller() -> Place | None:
    """For a call that another thread will make."""
    return _users(sys._getframe(1))


def warn(words: str) -> None:
    """A UserWarning at the line of the user's program that led here."""
    path, line, _ = of_caller() or (__file__, 0, "")
    warnings.warn_explicit(words, UserWarning, path, line)


def make_for(place: Place | None) -> None:
    """This thread makes the calls of another one, from there, until it says another place."""
    _submitted.place = place


def words_of(place: Place | None) -> str | None:
    return None if place is None else f"{place[0]}:{place[1]} in {place[2]}"


_MOST = 1024

_beneath: dict[int, CodeType] = {}
"""Code that is none of the user's, by its id; kept, so that no other comes to have it."""

_lines: dict[tuple[int, int], tuple[CodeType, str]] = {}
"""What lines of the user's code are called, by the code's id and the line."""


def of_message() -> str | None:
    """Where the message is sent that is being sent: about a microsecond, where the line has sent one before."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and id(frame.f_code) in _beneath:
        frame = frame.f_back
    if frame is not None:
        known = _lines.get((id(frame.f_code), frame.f_lineno))
        if known is not None:
            return known[1]
    return _learn(sys._getframe(1))


def _learn(frame: FrameType | None) -> str | None:
    if len(_lines) > _MOST or len(_beneath) > _MOST:  # code that is made again and again
        _lines.clear()
        _beneath.clear()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BENEATH:
        _beneath[id(frame.f_code)] = frame.f_code
        frame = frame.f_back
    if frame is None:
        return words_of(_submitted.place)
    words = words_of((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
    assert words is not None
    _lines[id(frame.f_code), frame.f_lineno] = (frame.f_code, words)
    return words
