"""Checkpoints of other libraries, by those libraries themselves, where they are installed: transformers, Lightning, TensorFlow,
DeepSpeed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_session import OneProcess, ck, empty_place, use  # noqa: F401
from test_ckpt_convert_others import save_named, trained

from evenstep import ckpt_convert
from evenstep.convert_formats import read

pytestmark = pytest.mark.more


def convert(source: Path, target: Path, kind: str | None, **options: Any) -> dict[str, Any]:
    words = {"force": False, "weights_only": False, "model": "model", "config": None, "shard_bytes": 1 << 40, **options}
    report: dict[str, Any] = ckpt_convert.convert(
        argparse.Namespace(input=source.absolute(), output=target.absolute(), kind=kind, **words)
    )
    return report


def gpt(transformers: Any) -> Any:
    torch.manual_seed(3)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=99, n_positions=16, use_cache=False)
    return transformers.GPT2LMHeadModel(config).eval()


def same(model: Any, other: Any) -> bool:
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        return bool(torch.equal(model(tokens).logits, other.eval()(tokens).logits))


@pytest.mark.parametrize("frozen", [False, True])
def test_transformers_loads_a_checkpoint_as_it_is(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its config.json beside it and nothing of ours; where parts are frozen, by the table of two files."""
    transformers = pytest.importorskip("transformers")
    model = gpt(transformers)
    if frozen:
        model.transformer.h.requires_grad_(False)
        monkeypatch.setattr("evenstep.checkpoint_models._LEAST_APART", 1)
    use(monkeypatch, OneProcess(model=model))
    path: Path = ck.checkpoint("here")
    (path / "config.json").write_text(json.dumps(model.config.to_dict()))
    assert (path / "model.safetensors.index.json").exists() == frozen
    assert same(model, transformers.AutoModelForCausalLM.from_pretrained(path))


@pytest.mark.parametrize("shard_bytes", [1 << 40, 20_000])
def test_transformers_loads_what_was_exported(shard_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt(transformers)
    use(monkeypatch, OneProcess(model=model))
    Path("config.json").write_text(json.dumps(model.config.to_dict()))
    convert(ck.checkpoint("here"), Path("out"), "hf", config=Path("config.json"), shard_bytes=shard_bytes)
    assert (
        len(list(Path("out").glob("model*.safetensors"))) == (1 if shard_bytes > 20_000 else len(files_of("out"))) > 0
    )
    assert same(model, transformers.AutoModelForCausalLM.from_pretrained("out"))


def files_of(folder: str) -> set[str]:
    table = json.loads((Path(folder) / "model.safetensors.index.json").read_text())
    return set(table["weight_map"].values())


@pytest.mark.parametrize("size", ["5GB", "20KB"])
def test_what_transformers_saved_is_loaded(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = gpt(transformers)
    model.save_pretrained("theirs", max_shard_size=size)
    convert(Path("theirs"), Path("ours"), "evenstep")
    torch.manual_seed(4)
    other = gpt(transformers)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    use(monkeypatch, OneProcess(model=other))
    ck.load_checkpoint("ours", optimizers=False, schedulers=False)
    assert same(model, other)


def test_lightning_saved_it(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Small(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.net(batch[0]).mean()  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=tmp_path
    )
    module = Small()
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    contents = read(tmp_path / "last.ckpt")
    assert contents.format == "Lightning" and contents.step == 8
    for name, tensor in module.state_dict().items():
        assert torch.equal(contents.model()[name], tensor)
    states = module.optimizers().state_dict()["state"]  # type: ignore[union-attr]
    assert torch.equal(contents.optimizers["optimizer"].state[0]["exp_avg"], states[0]["exp_avg"])
    convert(tmp_path / "last.ckpt", tmp_path / "ours", "evenstep")
    convert(tmp_path / "ours", tmp_path / "back.ckpt", "lightning")
    again = Small()
    again.load_state_dict(torch.load(tmp_path / "back.ckpt", weights_only=True)["state_dict"])
    assert torch.equal(again.net.weight, module.net.weight)


def test_tensorflow_reads_and_writes_it(tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    tensors = {
        "net.weight": torch.randn(7, 5),
        "net.bias": torch.randn(5, dtype=torch.float64),
        "count": torch.tensor([3], dtype=torch.int64),
        "half": torch.randn(9).to(torch.bfloat16),
    }
    torch.save(tensors, tmp_path / "model.pt")
    convert(tmp_path / "model.pt", tmp_path / "tf", "tensorflow", weights_only=True)
    prefix = next((tmp_path / "tf").glob("*.index")) if (tmp_path / "tf").is_dir() else tmp_path / "tf.index"
    reader = tensorflow.train.load_checkpoint(str(prefix.with_suffix("")))
    for name, tensor in tensors.items():
        key = next(one for one in reader.get_variable_to_shape_map() if one.split("/.ATTRIBUTES")[0].endswith(name))
        assert torch.equal(torch.tensor(reader.get_tensor(key).astype("float64")), tensor.to(torch.float64)), name
    theirs = tensorflow.train.Checkpoint(w=tensorflow.Variable([[1.5, 2.5]]), n=tensorflow.Variable(4, dtype="int64"))
    path = theirs.write(str(tmp_path / "their" / "ckpt"))
    found = read(Path(path)).model()
    assert {tuple(t.double().flatten().tolist()) for t in found.values()} >= {(1.5, 2.5), (4.0,)}


@pytest.mark.parametrize(("ranks", "stage"), [(1, 1), (3, 2), (64, 2), (1, 3), (2, 3), (3, 3), (64, 3)])
def test_deepspeed_reads_it(tmp_path: Path, ranks: int, stage: int) -> None:
    """By its zero_to_fp32, which is what goes with each of its checkpoints."""
    theirs = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    model, optimizer = trained("adam")
    save_named(model, optimizer, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "ds", "deepspeed", ranks=ranks, zero_stage=stage)
    found = theirs.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "ds"))
    assert set(found) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor.float()), name
