"""Calls of all ranks that come before es.prepare wait for all ranks too, and give what they give after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

CALLS = {
    "barrier": """
        here, there = pathlib.Path("rank 1 waits"), pathlib.Path("rank 0 wrote")
        if es.is_main():  # the usual idiom: rank 0 makes what all read
            while not here.exists():
                time.sleep(0.01)
            there.touch()
        else:
            here.touch()
        es.barrier()
        assert there.exists()
    """,
    "reduce_mean": "assert es.reduce_mean(float(es.rank())) == 0.5",
    "gather": "assert es.gather(torch.tensor([es.rank()])).tolist() == [0, 1]",
    "evaluate": "assert es.evaluate(nn.Linear(1, 1), [torch.ones(2) * es.rank()], lambda m, x: x) == 0.5",
    "set_weight": """
        es.set_weight(1.0 + 2 * es.rank())
        model = es.prepare(nn.Linear(1, 1))
        (model.bias * es.rank()).sum().backward()
        assert model.bias.grad.tolist() == [0.75], model.bias.grad
    """,
    "checkpoint": """
        assert es.checkpoint("kept", extra={"words": 1}).name == "kept"
        assert es.load_checkpoint("kept")["extra"] == {"words": 1}
    """,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_before_prepare(run_ranks: Callable[..., list[Any]], name: str) -> None:
    head = """
        import pathlib, time
        import torch
        from torch import nn
        import evenstep as es
    """
    body = CALLS[name] if CALLS[name].startswith("\n") else f"\n        {CALLS[name]}\n"
    run_ranks(head + body)
