"""Trainings that must end with the same bits, whoever computed which block: run as a script in every rank.

bitwise_cases.py CASE SPLITS [RANK STEP] [alone]: trains 7 steps in blocks, the splits drawn from SPLITS. With RANK and STEP that rank
dies after that step. "alone": outside any job. Rank 0 prints a digest of the model's bits, the steps, the last loss and
the parameters' norm as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

STEPS, BLOCK, BATCH = 7, 3, 26  # nine blocks, the last of two samples


class GPT(nn.Module):
    """Tied head, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(29, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48, bias=False), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.1))
        self.head = nn.Linear(16, 29, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return self.head(x + self.mlp(self.norm2(x)))


class Texts(Dataset):
    """Random lengths, and a random token replaced: the draw is new in every epoch."""

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        words = torch.randint(1, 29, (4 + index % 5,), generator=torch.Generator().manual_seed(index))
        words[random.randrange(len(words))] = torch.randint(1, 29, ()).item()
        return words


def padded(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(list(samples), batch_first=True)


def text_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A mean over tokens, whose number a block alone knows."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    count = int((targets != 0).sum())
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=0), count


class Images(Dataset):
    def __init__(self, dtype: torch.dtype, augmented: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(80, 3, 8, 8, generator=generator).to(dtype)
        self.labels = torch.randint(0, 5, (80,), generator=generator)
        self.augmented = augmented

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = self.images[index]
        return image.flip(-1) if self.augmented and random.random() < 0.5 else image, self.labels[index]


def cnn(dtype: torch.dtype, dropout: float = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8, momentum=None),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(72, 5),
    ).to(dtype)


def image_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def case(name: str) -> tuple[nn.Module, Any, Any, Any]:
    """Model, data set, collate_fn, train_step."""
    torch.manual_seed(3)
    if name == "gpt":
        return GPT(), Texts(), padded, text_loss
    if name == "gpt_bf16":
        return GPT().to(torch.bfloat16), Texts(), padded, text_loss
    if name == "cnn":
        return cnn(torch.float32), Images(torch.float32), None, image_loss
    if name in ("plain_fp64", "exact_fp64"):
        return cnn(torch.float64, 0.0), Images(torch.float64, augmented=False), None, image_loss
    raise ValueError(name)


def splits(seed: int, ranks: int) -> Any:
    def shares(number: int, batch: int) -> list[int]:
        draw = random.Random(1000 * seed + number)
        blocks = -(-batch // BLOCK)
        cuts = sorted(draw.randint(0, blocks) for _ in range(ranks - 1))
        ends = [min(batch, BLOCK * cut) for cut in [0, *cuts, blocks]]
        return [end - begin for begin, end in zip(ends, ends[1:])]

    return shares


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    name, seed = sys.argv[1], int(sys.argv[2])
    victim, last = (int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 4 else (-1, -1)
    if sys.argv[-1] == "alone":
        for variable in ("RANK", "WORLD_SIZE"):
            del os.environ[variable]
    import evenstep as es

    model, data, collate, loss = case(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    loader = DataLoader(
        data, batch_size=BATCH, shuffle=True, collate_fn=collate, num_workers=int(os.environ.get("WORKERS", "0"))
    )

    def on_step(trainer: Any) -> None:
        if trainer.step == last and es.rank() == victim:
            os._exit(9)

    exact = None if name.startswith("plain") else "bitwise"
    config = es.Config(
        exact=exact,
        block=BLOCK if exact else None,
        threads=1,
        clip_norm=1.0,
        shares=splits(seed, es.world_size()) if exact and seed >= 0 else None,
    )
    trainer = es.Trainer(model, optimizer, loss, scheduler=scheduler, on_step=on_step, config=config)
    trainer.fit(loader, epochs=3, steps=STEPS)
    if es.is_main():
        norm = sum(float(p.detach().double().square().sum()) for p in model.state_dict().values())
        print("END " + json.dumps([digest(model), trainer.step, trainer.loss.hex(), norm]))


if __name__ == "__main__":
    main()
