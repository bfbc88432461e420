"""What training scripts rely on besides the gradients: orders, evaluation, numbers over ranks, buffers, two models."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable
from typing import Any

CHECKS = pathlib.Path(__file__).parent / "prepare_checks.py"


def test_checks_hold_and_the_order_is_that_of_every_job_size(run_ranks: Callable[..., list[Any]]) -> None:
    orders = []
    for ranks in (1, 2, 3):
        out = run_ranks(CHECKS, ranks=ranks, fresh=ranks == 2)[0].stdout
        line = next(line for line in out.splitlines() if line.startswith("ORDER "))
        orders.append(json.loads(line.removeprefix("ORDER ")))
    assert orders[0] == orders[1] == orders[2]
