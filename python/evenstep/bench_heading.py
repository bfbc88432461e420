"""What stands above a result: on what it was measured, and with what."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from evenstep import _core


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def heading() -> dict[str, str]:
    """date, hardware."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "hardware": f"{processor()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start",
    }


def software() -> str:
    """Ours with the commit that it was built of, where that is known."""
    import torch

    commit = f" (commit {_core.commit})" if _core.commit else ""
    return f"evenstep {_core.version}{commit}, torch {torch.__version__}, Python {platform.python_version()}"
