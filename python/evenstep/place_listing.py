"""`evenstep ckpt ls URL`: the whole checkpoints at another place, in the columns of those of a folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evenstep.checkpoint_order import created_in


def entry(url: str, name: str, order: str, manifest: dict[str, Any]) -> dict[str, Any]:
    """As `evenstep ckpt ls --json` has it of one on disk."""
    state = manifest["state"]
    numbers = {
        key: state.get(key) if isinstance(state.get(key), int) else None for key in ("step", "epoch", "world_size")
    }
    return {
        "path": f"{url}/{name}",
        "name": name,
        **numbers,
        "created": created_in(order),
        "bytes": sum(file["bytes"] for file in manifest["files"]),
        "whole": True,
        "problem": None,
    }


def _size(amount: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"]
    while amount >= 1023.95 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{amount:.{0 if amount == int(amount) else 1}f} {units[0]}"


def table(entries: Iterable[dict[str, Any]]) -> str:
    rows = [("step", "epoch", "written (UTC)", "size", "ranks", "whole", "at")]
    for one in entries:
        numbers = ["-" if one[key] is None else str(one[key]) for key in ("step", "epoch", "world_size")]
        written = one["created"][:19].replace("T", " ")
        rows.append((*numbers[:2], written, _size(one["bytes"]), numbers[2], "yes", one["path"]))
    if len(rows) == 1:
        return "no checkpoints there"
    return "\n".join(f"{a:>10}  {b:>6}  {c:<19}  {d:>10}  {e:>5}  {f:<7}  {g}" for a, b, c, d, e, f, g in rows)
