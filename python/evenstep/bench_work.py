"""What `evenstep bench balance` trains: a model of evenstep.models, small enough for cores unless asked otherwise, and its data:
synthetic images or text, or CIFAR from local files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

from evenstep._core import EvenstepError
from evenstep.data import CIFAR10, CIFAR100, SyntheticImages, SyntheticText
from evenstep.models import BERT, GPT2, ResNet, SimpleCNN

MOST_STEPS = 200  # of a turn
WARM_UP = 2  # steps of a turn that do not count
SAMPLES = 256  # of synthetic data

_TEXT = {"layers": 4, "width": 128, "heads": 4, "length": 64, "words": 256}
# scaled down: so that a step of 64 samples takes some tenths of a second of a core
SMALL = {
    "simplecnn": {"width": 32, "side": 32, "classes": 10},
    "resnet50": {"blocks": 1, "width": 16, "side": 32, "classes": 10},
    "bert": _TEXT,
    "gpt2": _TEXT,
}
# as published; blocks=0: 3, 4, 6 and 3 bottlenecks
PUBLISHED = {
    "simplecnn": SMALL["simplecnn"],
    "resnet50": {"blocks": 0, "width": 64, "side": 224, "classes": 1000},
    "bert": {"layers": 12, "width": 768, "heads": 12, "length": 512, "words": 30522},
    "gpt2": {"layers": 12, "width": 768, "heads": 12, "length": 1024, "words": 50257},
}
_SHORT_TEXT = {"layers": 1, "width": 16, "heads": 2, "length": 16, "words": 256}
QUICK = {
    "simplecnn": {"width": 4, "side": 16, "classes": 10},
    "resnet50": {"blocks": 1, "width": 4, "side": 16, "classes": 10},
    "bert": _SHORT_TEXT,
    "gpt2": _SHORT_TEXT,
}
IMAGES = ("simplecnn", "resnet50")
_NO_WORD = -100  # what torch's cross_entropy passes over


def sizes_of(model: str, given: str, quick: bool = False) -> dict[str, int]:
    """given: "published", or some sizes instead of the small ones': "layers=2,width=64"."""
    if given == "published":
        return dict(PUBLISHED[model])
    own = dict(item.split("=", 1) for item in given.split(",") if item)
    return {**(QUICK if quick else SMALL)[model], **{name: int(value) for name, value in own.items()}}


def build_model(model: str, sizes: Mapping[str, int]) -> nn.Module:
    if model == "simplecnn":
        return SimpleCNN(sizes["classes"], width=sizes["width"])
    if model == "resnet50":
        blocks = [sizes["blocks"]] * 4 if sizes["blocks"] else [3, 4, 6, 3]
        return ResNet(sizes["classes"], blocks, sizes["width"], small_images=sizes["side"] < 64)
    kind = BERT if model == "bert" else GPT2
    words, length, layers, width, heads = (sizes[name] for name in ("words", "length", "layers", "width", "heads"))
    return kind(words, length, layers, width, heads, dropout=0.0)


def _local_images(path: str) -> CIFAR10 | CIFAR100:
    """CIFAR-10, or CIFAR-100 where that is what is there."""
    try:
        return CIFAR10(path, transform=_centred)
    except EvenstepError as error:
        try:
            return CIFAR100(path, transform=_centred)
        except EvenstepError:
            raise error from None


def _centred(image: torch.Tensor) -> torch.Tensor:
    return (image - 0.5) * 4.0


def _synthetic(model: str, sizes: Mapping[str, int]) -> TensorDataset:
    """In memory, so that drawing them takes no time of the step."""
    if model in IMAGES:
        images = SyntheticImages(SAMPLES, sizes["classes"], sizes["side"])
        pairs = [images[number] for number in range(SAMPLES)]
        return TensorDataset(torch.stack([one for one, _ in pairs]), torch.tensor([label for _, label in pairs]))
    words = sizes["words"]
    text = (
        SyntheticText(SAMPLES, sizes["length"], words - 1, mask=words - 1)
        if model == "bert"
        else SyntheticText(SAMPLES, sizes["length"], words)
    )
    return TensorDataset(*(torch.stack(part) for part in zip(*(text[number] for number in range(SAMPLES)))))


class Work:
    """The model, its data, a step."""

    def __init__(
        self, batch: int, quick: bool, model: str = "gpt2", sizes: str = "", data: str = "", batch_norm: str = "sync"
    ) -> None:
        self.batch, self.model, self.batch_norm = batch, model, batch_norm
        self.sizes = sizes_of(model, sizes, quick)
        self.data: Dataset[Any]
        if data:
            local = _local_images(data)
            self.sizes["side"], self.sizes["classes"] = 32, local.classes
            self.data, self.data_name = local, f"{local.name} from {Path(data).name}"
        else:
            self.data = _synthetic(model, self.sizes)
            self.data_name = f"synthetic {'images' if model in IMAGES else 'text'}"
        self.parameters = 0
        self.build()

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1234)
        model = build_model(self.model, self.sizes)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.normalises = any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules())
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loader(self, batch: int) -> DataLoader[Any]:
        sampler = RandomSampler(self.data, num_samples=(MOST_STEPS + WARM_UP + 1) * batch)  # type: ignore[arg-type]
        return DataLoader(self.data, batch_size=batch, sampler=sampler)

    def counts(self, targets: torch.Tensor) -> int | None:
        """What the loss is a mean over, where it is not the samples."""
        return int((targets != _NO_WORD).sum()) if self.model == "bert" else None

    def step(
        self, model: Any, optimizer: torch.optim.Optimizer, given: Any, targets: torch.Tensor, weight: float = 1.0
    ) -> None:
        found = model(given)
        if found.dim() == 3:  # a word for each place
            found, targets = found.flatten(0, 1), targets.flatten()
        loss = functional.cross_entropy(found, targets)
        optimizer.zero_grad()
        (loss * weight if weight != 1.0 else loss).backward()
        optimizer.step()

    def about(self) -> dict[str, Any]:
        """Which model this is, and how far from the published one."""
        with torch.device("meta"):
            published = sum(p.numel() for p in build_model(self.model, PUBLISHED[self.model]).parameters())
        return {
            "name": self.model,
            "sizes": self.sizes,
            "parameters": self.parameters,
            "published_parameters": published,
            "scaled_down": {**self.sizes, "classes": 0} != {**PUBLISHED[self.model], "classes": 0},
            "data": self.data_name,
            "batch_norm": self.batch_norm if self.normalises else None,
        }
