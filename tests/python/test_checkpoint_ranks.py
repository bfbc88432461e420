"""What each rank has of its own in a checkpoint is read by that rank alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, same, use  # noqa: F401
from torch import nn

from evenstep import EvenstepError
from evenstep.checkpoint_files import read_manifest, verify
from evenstep.checkpoint_state import Loader

VALUES = 5 << 19  # of a rank's: more than two chunks


def of_rank(rank: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(rank)
    return {"left 0": torch.randn(VALUES, generator=drawn), "sum 1 5": torch.randn(3, generator=drawn)}


EXCHANGE: dict[str, Any] = {
    "models": {"model": {"compression": "topk:0.1", "ranks": [of_rank(0), of_rank(1), of_rank(2)]}},
    "modes": {"model": {"late": [torch.ones(2)]}},
    "optimizers": {"optimizer": {"ranks": [{"w/a": torch.full((40000,), float(rank))} for rank in range(3)]}},
}


def session_of(monkeypatch: pytest.MonkeyPatch, rank: int, ranks: int) -> Any:
    model = nn.Linear(2, 2)
    session = use(monkeypatch, OneProcess(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)))
    session.rank, session.world_size = rank, ranks
    return session


def loader_of(session: Any, folder: Path) -> Loader:
    loader = Loader(session, folder, read_manifest(folder))
    loader.read_first(random=False)
    loader.files.check_rest()
    return loader


def test_a_rank_reads_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session_of(monkeypatch, 0, 3)
    monkeypatch.setattr(ck, "capture_exchange", lambda session: EXCHANGE)
    folder = Path(ck.checkpoint(tmp_path / "one"))
    manifest = read_manifest(folder)
    others: dict[str, Any] = {**EXCHANGE, "models": {"model": {"compression": "topk:0.1"}}, "optimizers": {}}
    for rank in range(3):
        found = loader_of(session_of(monkeypatch, rank, 3), folder).exchange()
        for kind, name in (("models", "model"), ("optimizers", "optimizer")):
            wanted = EXCHANGE[kind][name]["ranks"]
            same(found[kind][name].pop("ranks"), [one if r == rank else {} for r, one in enumerate(wanted)])
            found[kind] = {} if kind == "optimizers" else found[kind]
        same(found, others)
    same(loader_of(session_of(monkeypatch, 0, 2), folder).exchange(), EXCHANGE)  # of which each gets a part
    loader = loader_of(session := session_of(monkeypatch, 1, 3), folder)
    session.rank, session.world_size = 0, 2  # one was lost since it was read
    same(loader.exchange(), EXCHANGE)

    path = folder / "state.safetensors"
    whole = path.read_bytes()
    own = whole.index(of_rank(1)["left 0"].numpy().tobytes())
    at = own + (5 << 20)  # in a chunk with nothing of others
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for rank in (2, 0):
        session = session_of(monkeypatch, rank, 3)
        same(loader_of(session, folder).exchange()["models"]["model"]["ranks"][rank], of_rank(rank))
    ck.load_checkpoint(folder, random=False)  # with all that is left out
    for rank, ranks in ((1, 3), (0, 2), (3, 4)):
        with pytest.raises(EvenstepError, match=r"chunk \d of state.safetensors .* is altered"):
            loader_of(session_of(monkeypatch, rank, ranks), folder)
    with pytest.raises(EvenstepError, match=r"is altered"):
        verify(folder, manifest)
