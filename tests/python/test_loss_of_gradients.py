"""Losses of which the gradient of the batch's own loss is a part: the lines of docs/exactness.md train as one device does, and without
them it is told (forms of losses: test_loss_form.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from test_summed_losses import HEAD, apart, assert_exact

PAGE = Path(__file__).parents[2] / "docs" / "exactness.md"
CODE = """
def penalty(gradients):
    return 0.3 * sum(one.square().sum() for one in gradients).sqrt()


def train(prepares):
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    with torch.no_grad():
        for number, p in enumerate(model.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(number)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=8)
    F = functional
    if prepares:
        model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares)
    for x, y in loader:
        optimizer.zero_grad()
        if prepares:
            LINES
        else:
            loss = F.mse_loss(model(x), y)
            mine = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            (loss + penalty(mine)).backward()
        optimizer.step()
    return vector(model)

compare(train(True), train(False))
"""


def lines_of_the_page() -> str:
    section = PAGE.read_text(encoding="utf-8").partition("## Gradients inside a loss\n")[2]
    return section.partition("```python\n")[2].partition("```")[0]


def test_the_lines_of_the_docs_train_as_one_device(run_ranks: Callable[..., list[Any]]) -> None:
    lines = lines_of_the_page().replace("\n", "\n            ")
    assert "es.reduce_mean(gradient)" in lines
    assert_exact(run_ranks(HEAD + CODE.replace("LINES", lines), ranks=3))


def test_a_ranks_own_is_told(run_ranks: Callable[..., list[Any]]) -> None:
    loss = CODE.partition("        else:\n")[2].partition("        optimizer.step")[0].strip()
    code = CODE.replace("LINES", loss).replace(
        "shares=shares", "shares=lambda number, batch: [5, 3] if number % 2 else [2, 6]"
    )
    runs = run_ranks((HEAD + code).replace("(57,", "(56,"))
    assert min(apart(runs)) > 1e-4
    for run in runs:
        assert run.stderr.count("UserWarning: the loss is computed from the gradient of a mean") == 1, run.stderr


NESTED = """
import warnings

warnings.filterwarnings("ignore", ".*nested tensors")


def train(prepares):
    torch.manual_seed(1)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(data, batch_size=8)
    if prepares:
        model, optimizer, loader = es.prepare(model, optimizer, loader, shares=shares)
    for x, y in loader:
        optimizer.zero_grad()
        rows = model(torch.nested.nested_tensor(list(x[:, None])))
        functional.mse_loss(torch.nested.to_padded_tensor(rows * 2, 0.0)[:, 0], y).backward()
        optimizer.step()
    return vector(model)

compare(train(True), train(False))
"""


def test_nested_tensors_have_no_shape_to_look_at(run_ranks: Callable[..., list[Any]]) -> None:
    code = NESTED.replace("shares=shares", "shares=lambda number, batch: [3, 5]")
    assert_exact(run_ranks((HEAD + code).replace("(57,", "(56,")))
