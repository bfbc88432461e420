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


def next_steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients):
        parameter.grad = gradient.clone()
    optimizer.step()


KERAS: dict[str, tuple[dict[str, float], dict[str, float]]] = {  # settings there, and of torch's
    "Adam": ({"epsilon": 1e-8, "beta_1": 0.8}, {"eps": 1e-8, "betas": (0.8, 0.999)}),  # type: ignore[dict-item]
    "AdamW": ({"epsilon": 1e-8, "weight_decay": 0.1}, {"eps": 1e-8, "weight_decay": 0.1}),
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9}),
    "RMSprop": ({"rho": 0.9, "momentum": 0.7, "centered": True}, {"alpha": 0.9, "momentum": 0.7}),
    "Adagrad": ({"epsilon": 1e-8}, {"eps": 1e-8}),
    "Adadelta": ({"rho": 0.95, "epsilon": 1e-7}, {"rho": 0.95, "eps": 1e-7}),
}


@pytest.mark.parametrize("name", KERAS)
def test_keras_optimizers_go_on_in_torch(tmp_path: Path, name: str) -> None:
    """The same gradients after so many steps: a state under another name, or with another sign or factor, would go elsewhere."""
    tensorflow = pytest.importorskip("tensorflow")
    keras = pytest.importorskip("keras")
    theirs = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4)])
    optimizer = getattr(keras.optimizers, name)(0.05, **KERAS[name][0])
    chance = torch.Generator().manual_seed(3)
    gradients = [[torch.randn(3, 4, generator=chance), torch.randn(4, generator=chance)] for _ in range(6)]

    def step(one: list[torch.Tensor]) -> None:
        optimizer.apply([tensorflow.constant(gradient.numpy()) for gradient in one], theirs.trainable_variables)

    for one in gradients[:5]:
        step(one)
    path = tensorflow.train.Checkpoint(model=theirs, optimizer=optimizer).write(str(tmp_path / "keras" / "ckpt"))
    convert(Path(path), tmp_path / "out.pt", "six-key")
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    weights = loaded["model_state_dict"]
    kernel, bias = (next(value for key, value in weights.items() if key.endswith(end)) for end in ("kernel", "bias"))
    ours = torch.nn.ParameterList([kernel, bias])
    kind = getattr(torch.optim, name)
    again = kind(ours.parameters(), lr=0.05)
    again.load_state_dict(loaded["optimizer_state_dict"])
    assert loaded["step"] == 5 and again.param_groups[0]["lr"] == pytest.approx(0.05)
    again.param_groups[0].update(KERAS[name][1])
    next_steps(ours, again, gradients[5])
    step(gradients[5])
    for value, wanted in zip(ours.parameters(), theirs.trainable_variables):
        assert torch.allclose(value, torch.tensor(wanted.numpy()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["Adam", "SGD", "RMSprop", "Adagrad"])
def test_tensorflow_1_goes_on_with_torchs_states(tmp_path: Path, name: str) -> None:
    tensorflow = pytest.importorskip("tensorflow")
    settings: dict[str, Any] = {"SGD": {"momentum": 0.9}, "RMSprop": {"alpha": 0.9, "momentum": 0.7}}.get(name, {})
    model = torch.nn.Linear(3, 4)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.05, **settings)
    chance = torch.Generator().manual_seed(3)
    gradients = [[torch.randn(4, 3, generator=chance), torch.randn(4, generator=chance)] for _ in range(4)]
    for one in gradients[:3]:
        next_steps(model, optimizer, one)
    saved = {"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}
    torch.save({**saved, "scheduler_state_dict": None, "epoch": 0, "step": 3, "metrics": {}}, tmp_path / "in.pt")
    convert(tmp_path / "in.pt", tmp_path / "tf", "tensorflow")
    back = read(tmp_path / "tf")
    assert back.step == 3 and back.optimizers["optimizer"].class_name == name
    v1 = tensorflow.compat.v1
    make = {
        "Adam": lambda: v1.train.AdamOptimizer(0.05),
        "SGD": lambda: v1.train.MomentumOptimizer(0.05, 0.9),
        "RMSprop": lambda: v1.train.RMSPropOptimizer(0.05, decay=0.9, momentum=0.7, epsilon=1e-10),
        "Adagrad": lambda: v1.train.AdagradOptimizer(0.05),
    }[name]
    with tensorflow.Graph().as_default(), v1.Session() as session:
        step = v1.train.get_or_create_global_step()
        variables = [
            v1.get_variable(key, shape=tuple(value.shape), use_resource=True)
            for key, value in model.state_dict().items()
        ]
        pairs = [(tensorflow.constant(one.numpy()), variable) for one, variable in zip(gradients[3], variables)]
        train = make().apply_gradients(pairs, global_step=step)
        v1.train.Saver().restore(session, str(tmp_path / "tf" / "model"))  # each variable of the graph, or it raises
        session.run(train)
        theirs, count = session.run([variables, step])
    next_steps(model, optimizer, gradients[3])
    assert count == 4
    for value, wanted in zip(model.parameters(), theirs):
        assert torch.allclose(value, torch.tensor(wanted), rtol=1e-4, atol=1e-5)


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
