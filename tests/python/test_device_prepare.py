"""es.prepare on our NCCL engine (EVENSTEP_DEVICE_ENGINE=evenstep), over made-up libraries and streams: no GPU here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from test_backend_device import environment, fake  # noqa: F401

CASES = Path(__file__).with_name("device_prepare_cases.py")


@pytest.mark.parametrize(("dtype", "ranks"), [("double", 3), ("float", 2)])
def test_equals_one_device(run_ranks: Callable[..., Any], fake: Path, dtype: str, ranks: int) -> None:  # noqa: F811
    variables = {**environment(fake), "EVENSTEP_DEVICE_ENGINE": "evenstep"}
    run_ranks(CASES, ranks, args=(dtype,), env=variables)
