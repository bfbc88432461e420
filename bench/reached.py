"""One table of what is to be reached and what was: for the benches that gather other benches' figures."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from heading import heading


class Number(NamedTuple):
    what: str
    figure: str
    aim: str
    reached: bool | None  # None: not measured
    beside: str = ""


def missing(what: str) -> Number:
    return Number(what, "-", "", None)


def read(file: pathlib.Path | None) -> Any:
    """What another bench wrote as JSON; None where it did not run."""
    return json.loads(file.read_text()) if file is not None and file.is_file() else None


def print_top(title: str) -> None:
    top = {name: heading()[name] for name in ("date", "hardware", "software")}
    print(title)
    print("\n".join(f"  {name:9} {value}" for name, value in top.items()), end="\n\n")


def table(numbers: Sequence[Number]) -> Iterator[str]:
    for one in numbers:
        verdict = {True: "reached", False: "NOT reached", None: "not measured"}[one.reached]
        beside = f"  ({one.beside})" if one.beside else ""
        yield f"  {one.what:106} {one.figure:>10}  {one.aim:>16}  {verdict}{beside}"
    counts = [sum(one.reached is verdict for one in numbers) for verdict in (True, False, None)]
    yield f"\n  {counts[0]} reached, {counts[1]} not reached, {counts[2]} not measured"
