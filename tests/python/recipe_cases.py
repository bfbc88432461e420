"""Training as scripts do it: compiled, in mixed precision, checkpointed, scaled, several models, losses and optimizers. The same
parameters on several ranks with changing shares as in one process.

Run as a script in every rank by test_recipes.py; prints the relative differences as JSON (rank 0).

recipe_cases.py inductor: torch.compile with its own backend, against one process that compiles nothing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from gradient_cases import Prepared
from prepare_cases import GPT, texts, vector
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

BATCH, STEPS = 12, 10
Run = Callable[[Prepared], list[nn.Module]]


def text_loader() -> DataLoader[Any]:
    torch.manual_seed(4)
    return DataLoader(TensorDataset(*texts(BATCH * STEPS - 5)), batch_size=BATCH)


def image_loader(dtype: torch.dtype = torch.float64) -> DataLoader[Any]:
    torch.manual_seed(5)
    x = torch.randn(BATCH * STEPS - 5, 3, 8, 8, dtype=dtype)
    return DataLoader(TensorDataset(x, torch.randint(4, (len(x),))), batch_size=BATCH)


def predict(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def gpt(**options: Any) -> GPT:
    torch.manual_seed(1)
    return GPT(**options).double()


def adam(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=3e-3)


def compiled(first: bool, backend: str = "aot_eager", dynamic: bool | None = None) -> Run:
    """torch.compile before es.prepare, which then gets the compiled module, or after it. By inductor, in a job alone."""

    def run(prepared: Prepared) -> list[nn.Module]:
        disable = backend == "inductor" and prepared.es is None
        if backend == "inductor":
            torch.compiler.reset()  # else a case counts as a change of the sizes of the one before
        model: Any = gpt()
        if first:
            model = torch.compile(model, backend=backend, dynamic=dynamic, disable=disable)
        model, optimizer, loader = prepared(model, adam(model), text_loader())
        used = model if first else torch.compile(model, backend=backend, dynamic=dynamic, disable=disable)
        for x, y in loader:
            predict(used, x, y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [model]

    return run


class Checkpointed(GPT):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.gate(checkpoint(self.block, self.tokens(tokens), use_reentrant=False)))


def checkpointed(prepared: Prepared) -> list[nn.Module]:
    torch.manual_seed(1)
    model = Checkpointed().double()
    model, optimizer, loader = prepared(model, adam(model), text_loader())
    for x, y in loader:
        predict(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def autocast(prepared: Prepared) -> list[nn.Module]:
    torch.manual_seed(1)
    model = GPT()
    model, optimizer, loader = prepared(model, torch.optim.SGD(model.parameters(), lr=0.05), text_loader())
    for x, y in loader:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = predict(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def scaled(prepared: Prepared) -> list[nn.Module]:
    """One step overflows, on the rank that has that sample: all ranks leave it out, and halve the scale."""
    model = gpt()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    model, optimizer, loader = prepared(model, adam(model), text_loader())
    for number, (x, y) in enumerate(loader):
        loss = predict(model, x, y)
        if number == 4:
            loss = loss * (math.inf if prepared.samples and (prepared.es is None or is_first(prepared.es)) else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 2048.0, scaler.get_scale()
    return [model]


def is_first(es: Any) -> bool:
    """Whether this is the first rank that has samples."""
    shares = es.session().latest.shares
    return es.rank() == next(rank for rank, share in enumerate(shares) if share)


def clipped_by_value_in_groups(prepared: Prepared) -> list[nn.Module]:
    """Two optimizers of one model, of which one is clipped and steps at every other batch."""
    model = gpt()
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    slow, fast = torch.optim.SGD(norms, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=1e-3)
    model, slow, fast, loader = prepared(model, slow, fast, text_loader())
    for number, (x, y) in enumerate(loader):
        predict(model, x, y).backward()
        nn.utils.clip_grad_value_(others, 1e-3)
        fast.step()
        fast.zero_grad()
        if number % 2:
            slow.step()
            slow.zero_grad()
    return [model]


def gan(prepared: Prepared) -> list[nn.Module]:
    """Generator and critic with BatchNorm, an optimizer each; the critic's gradient of the generator's pass is thrown away."""
    torch.manual_seed(2)
    maker = nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 192)).double()
    critic = nn.Sequential(
        nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1)
    )
    critic.double()
    og, oc = torch.optim.Adam(maker.parameters(), lr=1e-3), torch.optim.Adam(critic.parameters(), lr=1e-3)
    maker, critic, og, oc, loader = prepared(maker, critic, og, oc, image_loader())
    for x, _ in loader:
        noise = x.flatten(1)[:, :6]
        made = maker(noise)
        oc.zero_grad()
        functional.softplus(-critic(x.flatten(1))).mean().backward()
        functional.softplus(critic(made.detach())).mean().backward()
        oc.step()
        og.zero_grad()
        functional.softplus(-critic(made)).mean().backward()
        og.step()
    return [maker, critic]


def several_losses(prepared: Prepared) -> list[nn.Module]:
    """One forward, three losses, backward by backward with the graph kept; the last by torch.autograd.backward."""
    model = gpt()
    model, optimizer, loader = prepared(model, adam(model), text_loader())
    for x, y in loader:
        out = model(x)
        functional.cross_entropy(out.flatten(0, 1), y.flatten()).backward(retain_graph=True)
        (0.1 * out.square().mean()).backward(retain_graph=True)
        last = out.logsumexp(-1).square().mean()
        torch.autograd.backward([last, out.mean()], [torch.ones_like(last) * 0.01, torch.ones((), dtype=out.dtype)])
        optimizer.step()
        optimizer.zero_grad()
    return [model]


def tokens(prepared: Prepared) -> list[nn.Module]:
    """Texts of unlike lengths, micro-batches of two: a mean over the tokens of each."""
    model = gpt()
    model, optimizer, loader = prepared(model, adam(model), text_loader())
    for number, (x, y) in enumerate(loader):
        y = torch.where(torch.arange(8) < 1 + x[:, :1] % 8, y, -100)
        prepared.set_weight(float((y != -100).sum()))
        (predict(model, x, y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [model]


def lbfgs(**options: Any) -> Run:
    """A closure: several backward passes in a step, which ends by the loss."""

    def run(prepared: Prepared) -> list[nn.Module]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4)).double()
        optimizer = torch.optim.LBFGS(model.parameters(), **options)
        model, optimizer, loader = prepared(model, optimizer, image_loader())
        for x, y in loader:

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
        return [model]

    return run


CASES: dict[str, Run] = {
    "compiled_first": compiled(True),
    "compiled_after": compiled(False),
    "checkpointed": checkpointed,
    "autocast": autocast,
    "scaled": scaled,
    "two_optimizers_of_one_model": clipped_by_value_in_groups,
    "gan": gan,
    "several_losses": several_losses,
    "tokens": tokens,
    "lbfgs": lbfgs(lr=0.1, max_iter=10, tolerance_change=0.05),
    "lbfgs_with_a_line_search": lbfgs(max_iter=3, line_search_fn="strong_wolfe"),
}


INDUCTOR: dict[str, Run] = {
    "compiled_first": compiled(True, "inductor"),
    "compiled_after_for_any_size": compiled(False, "inductor", dynamic=True),
}


def main() -> None:
    import evenstep as es

    cases = INDUCTOR if "inductor" in sys.argv else CASES
    first = es.is_main()  # alone it trains plainly, and tells
    plain = {name: [vector(model) for model in run(Prepared(None, None))] for name, run in cases.items() if first}
    found = {}
    for name, run in cases.items():
        es.session().loaders.clear()  # of the cases before
        ours = torch.cat([vector(model) for model in run(Prepared(es, None))])
        everywhere = es.gather(ours[None])
        if not first:
            continue
        expected = torch.cat(plain[name])
        difference = float((ours - expected).norm() / expected.norm())
        found[name] = {"difference": difference, "same_on_all_ranks": bool((everywhere == everywhere[0]).all())}
    if first:
        print("RESULTS " + json.dumps(found))


if __name__ == "__main__":
    main()
