"""Backend "evenstep" beside dense collectives, and the ways in which PyTorch's own wrappers use a backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("part", ["rest", "absent"])
def test_what_else_a_backend_is_asked_for(run_ranks: Callable[..., Any], part: str) -> None:
    run_ranks(FOLDER / "backend_rest_cases.py", 3, args=(part,), timeout=150)


def test_the_wrappers_of_torch(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    run_ranks(FOLDER / "backend_pattern_cases.py", 2, args=(str(tmp_path / "saved"),), timeout=170)
