"""Trainings that must end with the same bits, whoever computed which block: run as a script in every rank.

bitwise_cases.py CASE SPLITS [RANK STEP] [alone]: trains 7 steps (STEPS in the environment: as many) in blocks, the splits drawn from
SPLITS (-1: the balancer's). With RANK and STEP that rank dies after that step. "alone": outside any job. Rank 0 prints a digest of
the model's bits, the steps, the last loss and the parameters' norm as JSON.

LOST="1:3,0:5" (of jobs with --recovery): these ranks die in the midst of these steps, each once (LOST_FOLDER keeps who has); "1:6:2"
in the second batch behind step 5, the first of which a scaler has skipped. LOST_IN=1: in the second train_step of a step. SPLITS
then draws a policy's answers, for a schedule knows no other number of ranks.

MOST="7" (of one rank): es.prepare(most_samples=7). Each rank prints the most samples that it had in a step.
BLOCK=13: two blocks. DEVICE=1: gradients are on a made-up device (exact_device.py). EVAL=1: the model is given in eval(), and train_step begins with train().
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import random
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset

STEPS, BATCH = int(os.environ.get("STEPS", "7")), 26
BLOCK = int(os.environ.get("BLOCK", "3"))  # nine blocks, the last of two samples


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


class Gaps(Texts):
    """Most of them count nothing, so that whole blocks do not."""

    def __getitem__(self, index: int) -> torch.Tensor:
        words = super().__getitem__(index)
        return words if index % 4 == 0 else torch.cat([words[:1], torch.zeros(3, dtype=torch.int64)])


def gaps_loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A mean by hand: over no token it is not a number, nor are its gradients."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    losses = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    counted = (targets.flatten() != 0).float()
    return (losses * counted).sum() / counted.sum(), int(counted.sum())


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


class Shared(nn.Module):
    """One convolution before a BatchNorm, again behind it, and a third time behind the last one: autocast may keep its weight in 16 bits
    from one use to the next, whichever block asks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norms[0](self.conv(self.first(x))).relu()
        x = self.norms[1](self.conv(x)).relu()
        return self.head(self.conv(x).mean(dim=(2, 3)))


def autocast(loss: Any, dtype: torch.dtype) -> Any:
    def cast(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", dtype):
            return loss(model, batch)

    return cast


def autocast_kept(loss: Any, dtype: torch.dtype) -> Any:
    """By a context that is made once, where autocast keeps 16-bit copies of weights."""
    context = torch.autocast("cpu", dtype)

    def cast(model: nn.Module, batch: Any) -> Any:
        with context:
            assert torch.is_autocast_cache_enabled()
            return loss(model, batch)

    return cast


def autocast_around(loss: Any) -> Any:
    """By one around the training (see main)."""

    def cast(model: nn.Module, batch: Any) -> Any:
        assert torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16
        return loss(model, batch)

    return cast


class Recomputed(nn.Module):
    """Activation checkpointing: forward runs again in backward, with the same random numbers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Any:
        return checkpoint(self.inner, *given, use_reentrant=False)


def masked_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
    """A mean over the words taken out."""
    words, targets = batch
    found = functional.cross_entropy(model(words).flatten(0, 1).float(), targets.flatten())
    return found, int((targets != -100).sum())


def bert() -> tuple[nn.Module, Any, Any, Any]:
    from evenstep.data import SyntheticText
    from evenstep.models import BERT

    return BERT(40, 12, 2, 16, 2), SyntheticText(80, 12, 39, mask=39), None, masked_loss


def stacked(samples: Sequence[tuple[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([sample for (sample,) in samples])


class Points(Dataset):
    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(6, generator=torch.Generator().manual_seed(index)) + 0.1 * random.random()


def gan(norm: Any, dropout: float) -> tuple[list[nn.Module], list[Any]]:
    """A generator in two models, and what tells its points from others; two losses."""
    stem = nn.Sequential(nn.Linear(4, 12), norm(12), nn.ReLU())
    head = nn.Linear(12, 6)
    discriminator = nn.Sequential(nn.Linear(6, 12), norm(12), nn.LeakyReLU(), nn.Dropout(dropout), nn.Linear(12, 1))

    def drawn(stem: nn.Module, head: nn.Module, count: int) -> torch.Tensor:
        return head(stem(torch.randn(count, 4)))

    def told_apart(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
        *generator, discriminator = models
        with torch.no_grad():
            fake = drawn(*generator, len(batch))
        return functional.softplus(-discriminator(batch)).mean() + functional.softplus(discriminator(fake)).mean()

    def taken_for_others(models: Sequence[nn.Module], batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Of another number of points."""
        *generator, discriminator = models
        count = len(batch) // 2 + 1
        return functional.softplus(-discriminator(drawn(*generator, count))).mean(), count

    return [stem, head, discriminator], [told_apart, taken_for_others]


def penalised(loss: Any) -> Any:
    """With a penalty on how steep the discriminator is at each sample (WGAN-GP)."""

    def with_penalty(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(models[-1](batch).sum(), batch, create_graph=True)
        return loss(models, batch.detach()) + (slope.norm(dim=1) - 1).square().mean()

    return with_penalty


def scaler_of(name: str) -> Any:
    """It begins with gradients that fp16 does not hold, so that it skips steps; then it grows until it skips one again."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2) if "scaler" in name else None


def case(name: str) -> tuple[Any, Any, Any, Any]:
    """Model, data set, collate_fn, train_step; of several models and train_steps lists."""
    torch.manual_seed(3)
    if name == "gan":
        models, losses = gan(nn.BatchNorm1d, 0.1)
        return models, Points(), None, losses
    if name == "gan_penalty":
        models, losses = gan(nn.LayerNorm, 0.1)
        return models, Points(), None, [penalised(losses[0]), losses[1]]
    if name == "gan_scaler":
        models, losses = gan(nn.BatchNorm1d, 0.1)
        return models, Points(), None, [autocast(loss, torch.float16) for loss in losses]
    if name in ("gan_plain_fp64", "gan_exact_fp64"):  # without random numbers
        models = [model.double() for model in gan(nn.BatchNorm1d, 0.0)[0]]

        def fooled(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
            return functional.softplus(-models[2](models[1](models[0](batch[:, :4])))).mean()

        def seen(models: Sequence[nn.Module], batch: torch.Tensor) -> torch.Tensor:
            fake = models[1](models[0](batch[:, :4])).detach()
            return functional.softplus(-models[2](batch)).mean() + functional.softplus(models[2](fake)).mean()

        return models, TensorDataset(torch.randn(80, 6, dtype=torch.float64)), stacked, [seen, fooled]
    if name == "bert":
        return bert()
    if name == "bert_scaler_recomputed":
        model, data, collate, loss = bert()
        model.layers = nn.ModuleList(map(Recomputed, model.layers))
        return model, data, collate, autocast(loss, torch.float16)
    if name == "gpt_autocast":
        return GPT(), Texts(), padded, autocast(text_loss, torch.bfloat16)
    if name == "gpt_autocast_around":
        return GPT(), Texts(), padded, autocast_around(text_loss)
    if name == "gpt_scaler":
        return GPT(), Texts(), padded, autocast(text_loss, torch.float16)
    if name == "gpt_recomputed":
        gpt = GPT()
        gpt.mlp, gpt.qkv = Recomputed(gpt.mlp), Recomputed(gpt.qkv)
        return gpt, Texts(), padded, text_loss
    if name == "cnn_autocast":
        return Shared(), Images(torch.float32), None, autocast(image_loss, torch.bfloat16)
    if name == "cnn_autocast_kept":
        return Shared(), Images(torch.float32), None, autocast_kept(image_loss, torch.bfloat16)
    if name == "cnn_autocast_around":
        return Shared(), Images(torch.float32), None, autocast_around(image_loss)
    if name == "cnn_recomputed":
        layers = cnn(torch.float32)
        return (
            nn.Sequential(layers[0], Recomputed(layers[1:4]), Recomputed(layers[4:7]), *layers[7:]),
            Images(torch.float32),
            None,
            image_loss,
        )
    if name == "gpt":
        return GPT(), Texts(), padded, text_loss
    if name == "gpt_gaps":
        return GPT(), Gaps(), padded, gaps_loss
    if name == "gpt_bf16":
        return GPT().to(torch.bfloat16), Texts(), padded, text_loss
    if name == "cnn":
        return cnn(torch.float32), Images(torch.float32), None, image_loss
    if name == "cnn_frozen":
        return cnn(torch.float32).eval(), Images(torch.float32), None, image_loss
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


def policy(seed: int) -> Any:
    """As splits, of blocks, by what every rank knows alike; for any number of ranks."""

    def shares(view: Any) -> list[int]:
        draw = random.Random(1000 * seed + 10 * view.steps + view.ranks)
        cuts = sorted(draw.randint(0, view.batch) for _ in range(view.ranks - 1))
        return [end - begin for begin, end in zip([0, *cuts], [*cuts, view.batch])]

    return shares


class Deaths:
    def __init__(self) -> None:
        lost = (one.split(":") for one in os.environ.get("LOST", "").split(",") if one)
        self._steps = {
            int(step): int(batch[0]) if batch else 0 for rank, step, *batch in lost if rank == os.environ.get("RANK")
        }
        self._ended, self._batch = 0, 1  # the last step, which batch since it is under way

    def ends(self, step: int) -> None:
        self._batch = self._batch + 1 if step == self._ended else 1
        self._ended = step

    def now(self, step: int) -> None:
        if self._steps.get(step, -1) not in (0, self._batch):
            return
        del self._steps[step]
        mark = pathlib.Path(os.environ["LOST_FOLDER"], f"{os.environ['RANK']}-{step}")
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            return  # whose place it takes
        os.kill(os.getpid(), signal.SIGKILL)


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

    if "DEVICE" in os.environ:
        import exact_device

        exact_device.pretend()
    model, data, collate, loss = case(name)
    begins = "EVAL" in os.environ
    if begins:
        model.eval()
    models = model if isinstance(model, list) else [model]
    trained = [models[-1:], models[:-1]] if isinstance(loss, list) else [models]  # by which optimizer
    optimizers = [
        torch.optim.AdamW([p for one in each for p in one.parameters()], lr=1e-2, foreach=False) for each in trained
    ]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.95) for one in optimizers]
    loader = DataLoader(
        data, batch_size=BATCH, shuffle=True, collate_fn=collate, num_workers=int(os.environ.get("WORKERS", "0"))
    )

    deaths, had = Deaths(), [0]
    job = es.session()  # where blocks run side by side, each has a session of its own in its place

    def of(number: int, loss: Any) -> Any:
        def train_step(model: Any, batch: Any) -> Any:
            if number == int(os.environ.get("LOST_IN", "0")):
                deaths.now(job.step + (number == 0))  # the step under way, which the first optimizer commits
            if begins:
                model.train()
            return loss(model, batch)

        return train_step

    def on_step(trainer: Any) -> None:
        deaths.ends(trainer.step)
        deaths.now(trainer.step)  # a rank without blocks
        had.append(es.session().latest.samples)
        if trainer.step == last and es.rank() == victim:
            os._exit(9)

    most = {"most_samples": int(os.environ["MOST"])} if "MOST" in os.environ else {}
    exact = None if "plain" in name else "bitwise"
    config = es.Config(
        exact=exact,
        block=BLOCK if exact else None,
        threads=1,
        clip_norm=1.0,
        shares=splits(seed, es.world_size()) if exact and seed >= 0 and "LOST" not in os.environ else None,
        policy=policy(seed) if exact and "LOST" in os.environ else None,
        options=most,
        on_nonfinite="stop" if name == "gpt_gaps" else None,
    )
    scaler = scaler_of(name)
    train_steps = [of(number, one) for number, one in enumerate(loss if isinstance(loss, list) else [loss])]
    given = (model, optimizers, train_steps) if isinstance(loss, list) else (model, optimizers[0], train_steps[0])
    trainer = es.Trainer(*given, scheduler=schedulers, scaler=scaler, on_step=on_step, config=config)
    with torch.autocast("cpu", torch.bfloat16, enabled=name.endswith("around")):
        trainer.fit(loader, epochs=STEPS, steps=STEPS)
    print(f"MOST {max(had)}")
    if scaler is not None:
        print(f"SCALE {scaler.get_scale()}")
    if es.is_main():
        whole = nn.ModuleList(model) if isinstance(model, list) else model
        norm = sum(float(p.detach().double().square().sum()) for p in whole.state_dict().values())
        print("END " + json.dumps([digest(whole), trainer.step, trainer.loss.hex(), norm]))


if __name__ == "__main__":
    main()
