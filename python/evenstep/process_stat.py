"""What the kernel tells of a process, as src/os/process_stat.h reads it in C."""

from __future__ import annotations

from pathlib import Path


def process_stat(process: int | str) -> list[str]:
    """proc(5) from the state on ("self": this one's); nothing where there is no such process, or another user's is hidden."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text[text.rindex(")") + 2 :].split()
