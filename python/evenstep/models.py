"""Models to try things with, written out in plain torch: SimpleCNN, ResNet, BERT and GPT2. Their defaults are the published
sizes (ResNet-50, BERT-base, GPT-2 small); every size can be given smaller. Weights are random: nothing is fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

__all__ = ["BERT", "GPT2", "ResNet", "SimpleCNN"]


class SimpleCNN(nn.Module):
    """Three convolutions with BatchNorm, each followed by pooling, and one linear layer, for images of 8 × 8 and more.

    Images of (batch, channels, height, width) -> logits of (batch, classes). 94,762 parameters by default.
    batch_norm=False leaves the BatchNorms out (each sample then counts by itself).
    """

    def __init__(self, classes: int = 10, channels: int = 3, width: int = 32, *, batch_norm: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for level in range(3):
            wide = width * 2**level
            layers.append(nn.Conv2d(channels, wide, 3, padding=1, bias=not batch_norm))
            layers += [nn.BatchNorm2d(wide)] if batch_norm else []
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            channels = wide
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


def _convolution(given: int, made: int, side: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(given, made, side, stride, padding=side // 2, bias=False)


class _Bottleneck(nn.Module):
    def __init__(self, given: int, width: int, stride: int) -> None:
        super().__init__()
        made = 4 * width
        self.path = nn.Sequential(
            *(_convolution(given, width, 1), nn.BatchNorm2d(width), nn.ReLU()),
            *(_convolution(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU()),
            *(_convolution(width, made, 1), nn.BatchNorm2d(made)),
        )
        straight = given == made and stride == 1
        self.shortcut = (
            nn.Identity() if straight else nn.Sequential(_convolution(given, made, 1, stride), nn.BatchNorm2d(made))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.path(x) + self.shortcut(x))


class ResNet(nn.Module):
    """A residual network of bottlenecks; by default ResNet-50 (He, Zhang, Ren and Sun, 2016; the stride is in the 3 × 3
    convolution, as everybody trains it): 25,557,032 parameters.

    Images of (batch, channels, height, width) -> logits of (batch, classes). blocks: how many bottlenecks in each stage.
    small_images=True: for 32 × 32 pixels, with a first convolution of 3 × 3 and no pooling behind it.
    """

    def __init__(
        self,
        classes: int = 1000,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        channels: int = 3,
        *,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        first = _convolution(channels, width, 3) if small_images else _convolution(channels, width, 7, 2)
        stem: list[nn.Module] = [first, nn.BatchNorm2d(width), nn.ReLU()]
        stem += [] if small_images else [nn.MaxPool2d(3, 2, padding=1)]
        self.stem = nn.Sequential(*stem)
        stages: list[nn.Module] = []
        given = width
        for level, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if number == 0 and level > 0 else 1
                stages.append(_Bottleneck(given, width * 2**level, stride))
                given = 4 * width * 2**level
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(given, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width={width} cannot be dealt out to heads={heads}\n  fix: make width a multiple of heads"
            )
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, attended: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(
            *(q, k, v),
            attn_mask=None if attended is None else attended[:, None, None, :],
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        return self.out(found.transpose(1, 2).reshape(batch, length, width))


class _Layer(nn.Module):
    """before: normalised before attention and before the MLP (GPT-2), else after the sums (BERT)."""

    def __init__(self, width: int, heads: int, inner: int, dropout: float, before: bool) -> None:
        super().__init__()
        self.before = before
        epsilon = 1e-5 if before else 1e-12
        self.attention = _Attention(width, heads, dropout, causal=before)
        self.attention_norm = nn.LayerNorm(width, epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(width, inner), nn.GELU(approximate="tanh" if before else "none"), nn.Linear(inner, width)
        )
        self.mlp_norm = nn.LayerNorm(width, epsilon)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, attended: torch.Tensor | None = None) -> torch.Tensor:
        if self.before:
            x = x + self.drop(self.attention(self.attention_norm(x), attended))
            return x + self.drop(self.mlp(self.mlp_norm(x)))
        x = self.attention_norm(x + self.drop(self.attention(x, attended)))
        return self.mlp_norm(x + self.drop(self.mlp(x)))


def _initialise(module: nn.Module) -> None:
    """As both papers' code does: normal with 0.02, biases zero."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _check_length(length: int, most: int) -> None:
    if length > most:
        raise ValueError(
            f"{length} tokens are more than the {most} places that the model has\n"
            "  fix: shorter samples, or length= of the model"
        )


class BERT(nn.Module):
    """An encoder with the head that fills in masked words; by default BERT-base (Devlin, Chang, Lee and Toutanova, 2019):
    109,514,298 parameters. The head for next sentences is left out.

    Words of (batch, length) -> logits of (batch, length, words). types: 0 or 1, of the first or second sentence (all 0).
    attended: True where there is a word and no padding (everywhere).
    """

    def __init__(
        self,
        words: int = 30522,
        length: int = 512,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        inner: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.length = length
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_Layer(width, heads, inner or 4 * width, dropout, False) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, 1e-12))
        self.head = nn.Linear(width, words)
        self.apply(_initialise)
        self.head.weight = self.words.weight  # tied

    def forward(
        self, words: torch.Tensor, types: torch.Tensor | None = None, attended: torch.Tensor | None = None
    ) -> torch.Tensor:
        _check_length(words.shape[1], self.length)
        types = torch.zeros_like(words) if types is None else types
        x = self.words(words) + self.places.weight[: words.shape[1]] + self.types(types)
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x, attended)
        return self.head(self.transform(x))


class GPT2(nn.Module):
    """A decoder that predicts the next word; by default GPT-2 small (Radford and others, 2019): 124,439,808 parameters.

    Words of (batch, length) -> logits of (batch, length, words).
    """

    def __init__(
        self,
        words: int = 50257,
        length: int = 1024,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        inner: int | None = None,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.length = length
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(_Layer(width, heads, inner or 4 * width, dropout, True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.apply(_initialise)
        for layer in self.layers:  # what adds to the residual stream: smaller the more there are of it
            for last in (layer.attention.out, layer.mlp[2]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * layers))
        self.head.weight = self.words.weight  # tied

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        _check_length(words.shape[1], self.length)
        x = self.drop(self.words(words) + self.places.weight[: words.shape[1]])
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
