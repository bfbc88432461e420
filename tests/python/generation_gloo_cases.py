"""The scripts of generation_cases.py with gradients that go over torch's Gloo."""

from __future__ import annotations

from generation_cases import HEAD

_OVER_GLOO = """
from evenstep import generation_torch
from evenstep.torch_engine import TorchEngine

around(TorchEngine, "_hand_on", "handing", "handed")
around(TorchEngine, "_hand_on_rest", "summing", "summed")
make_gloo = generation_torch.MAKERS["gloo"]


class Meeting(torch.distributed.Store):
    # Where the ranks tell one another how to connect.
    def __init__(self, store):
        super().__init__()
        self.store = store

    def set(self, key, value):
        here("calling")
        self.store.set(key, value)
        here("connecting")

    def get(self, key):
        return self.store.get(key)

    def wait(self, *given):
        self.store.wait(*given)


if "calling" in sys.argv[1] or "connecting" in sys.argv[1]:
    generation_torch.MAKERS["gloo"] = lambda store, *rest: make_gloo(Meeting(store), *rest)
made_before = make


def make():
    made = made_before()
    made[0].register_parameter("extra", torch.nn.Parameter(torch.ones(3)))
    made[1].add_param_group({"params": [made[0].extra]})
    return made[0], made[1], torch.optim.lr_scheduler.StepLR(made[1], 4, 0.8)


def own_loss(model, batch):
    return loss_of(model, batch) + (0 * model.extra.sum() if rank == LAST else 0)
"""


def over_gloo(source: str, last: int, options: str = "") -> str:
    """Gradients go over torch's Gloo, each parameter's by itself. One has a gradient on rank `last` alone: the others hand zeros on for
    it after the vote, and whoever dies there is waited for in that sum."""
    loop = source[len(HEAD) :] if source.startswith(HEAD) else source[source.index("es.barrier()\nmodel") :]
    prepared = f"es.prepare(*make(), loader, engine='torch', bucket_cap_mb=1e-5{options})"
    assert loop.count("es.prepare(*make(), loader)") == loop.count("loss_of(model, batch)") == 1
    loop = loop.replace("es.prepare(*make(), loader)", prepared).replace(
        "loss_of(model, batch)", "own_loss(model, batch)"
    )
    head = HEAD if source.startswith(HEAD) else source[: source.index("es.barrier()\nmodel")]
    return f"{head}LAST = '{last}'\n{_OVER_GLOO}{loop}"
