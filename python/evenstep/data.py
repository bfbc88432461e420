"""Data sets to try things with: synthetic images and text, made when they are asked for, and CIFAR from local files.

All are map-style, and give the same sample for the same index in every process. Nothing is ever downloaded, and no pickle is
read.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Union

import torch
from torch.nn import functional
from torch.utils.data import Dataset

from evenstep._core import EvenstepError

__all__ = ["CIFAR10", "CIFAR100", "SyntheticImages", "SyntheticText"]

Place = Union[str, "PathLike[str]"]
_NO_WORD = -100  # what torch's cross_entropy passes over


def _generator(seed: int, index: int) -> torch.Generator:
    """Of the sample alone. The numbers are mixed, so that neighbours and other seeds have nothing in common (splitmix64:
    Steele, Lea and Flood 2014)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + index + 1) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return torch.Generator().manual_seed((mixed ^ mixed >> 29) & 0x7FFFFFFFFFFFFFFF)


def _check_index(index: int, count: int) -> int:
    if not -count <= index < count:
        raise IndexError(f"sample {index} of {count}")
    return index % count


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size}: give a number of at least 1")


class SyntheticImages(Dataset[tuple[torch.Tensor, int]]):
    """Images that a model can learn to tell apart: each class has a coarse pattern of its own, under noise.

    A sample is (channels × side × side floats, mean about 0; the class). Classes take turns, so that each has as many.
    seed: another one gives other patterns and other noise.
    """

    def __init__(
        self,
        count: int = 50_000,
        classes: int = 10,
        side: int = 32,
        channels: int = 3,
        *,
        noise: float = 1.0,
        seed: int = 0,
    ) -> None:
        _check_sizes(count=count, classes=classes, side=side, channels=channels)
        self.count, self.classes, self.side, self.noise, self.seed = count, classes, side, noise, seed
        self._patterns = torch.randn(classes, channels, 4, 4, generator=_generator(seed, -1))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        index = _check_index(index, self.count)
        label = index % self.classes
        pattern = functional.interpolate(
            self._patterns[label : label + 1], size=(self.side, self.side), mode="bilinear"
        )[0]
        noise = torch.randn(pattern.shape, generator=_generator(self.seed, index))
        return pattern + self.noise * noise, label


class SyntheticText(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Text that a model can learn to continue: four of five words follow from the one before, the fifth is any.

    A sample is (length words, length targets), whole numbers below `words`. The targets are the words that come next. With
    mask, a word of the model's vocabulary that stands for a missing one, they are the words that were taken out, and -100
    (which cross_entropy passes over) elsewhere: 15% of the words, of which 80% become `mask`, 10% any word, 10% stay
    (Devlin and others, 2019, section 3.1). The loss is then a mean over another number of words on each rank: es.set_weight.
    """

    def __init__(
        self, count: int = 100_000, length: int = 128, words: int = 50257, *, mask: int | None = None, seed: int = 0
    ) -> None:
        _check_sizes(count=count, length=length, words=words)
        if mask is not None and mask < 0:
            raise ValueError(f"mask={mask}: give the number of a word")
        self.count, self.length, self.words, self.mask, self.seed = count, length, words, mask, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = _generator(self.seed, _check_index(index, self.count))
        length = self.length + (self.mask is None)
        any_word = torch.randint(self.words, (length,), generator=generator)
        follows = torch.rand(length, generator=generator) < 0.8
        text = any_word.tolist()
        for at in torch.nonzero(follows[1:]).flatten().tolist():
            text[at + 1] = (31 * text[at] + 7) % self.words
        whole = torch.tensor(text)
        if self.mask is None:
            return whole[:-1], whole[1:]
        taken = torch.rand(length, generator=generator) < 0.15
        taken[int(torch.randint(length, (1,), generator=generator))] = True  # at least one, so that the mean is one
        becomes = torch.rand(length, generator=generator)
        shown = torch.where(taken & (becomes < 0.8), torch.tensor(self.mask), whole)
        other = torch.randint(self.words, (length,), generator=generator)
        shown = torch.where(taken & (becomes >= 0.9), other, shown)
        return shown, torch.where(taken, whole, torch.tensor(_NO_WORD))


class _CIFAR(Dataset[tuple[Any, int]]):
    """What both have in common: records of labels and 32 × 32 pixels, three planes each."""

    name, folder, archive = "", "", ""
    pickles: tuple[str, ...] = ()
    classes, label_bytes = 0, 0

    def __init__(self, path: Place, train: bool, label: int, transform: Callable[[torch.Tensor], Any] | None) -> None:
        self.transform = transform
        parts = [self._records(name, data) for name, data in self._files(Path(path).expanduser(), self._names(train))]
        records = torch.cat(parts)
        self.labels = records[:, label].long()
        self.images = records[:, self.label_bytes :].reshape(-1, 3, 32, 32)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        index = _check_index(index, len(self.labels))
        image = self.images[index].float() / 255
        return (image if self.transform is None else self.transform(image)), int(self.labels[index])

    @staticmethod
    def _names(train: bool) -> list[str]:
        raise NotImplementedError

    def _files(self, path: Path, names: list[str]) -> list[tuple[str, bytearray]]:
        archive = path if path.is_file() else path / self.archive
        for folder in (path, path / self.folder):
            if (folder / names[0]).exists():
                return [(name, bytearray(self._read(folder / name))) for name in names]
        if archive.is_file():
            return self._unpack(archive, names)
        self._missing(path)
        return []

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise EvenstepError(f"{path} is missing, though others of {self.name} are there") from None

    def _unpack(self, archive: Path, names: list[str]) -> list[tuple[str, bytearray]]:
        """Only the members that are wanted, into memory: nothing is written."""
        found: dict[str, bytearray] = {}
        try:
            with tarfile.open(archive) as members:
                for member in members:
                    name = Path(member.name).name
                    if member.isfile() and name in names:
                        reader = members.extractfile(member)
                        found[name] = bytearray(reader.read() if reader is not None else b"")
        except (tarfile.TarError, zlib.error, OSError, EOFError) as error:
            raise EvenstepError(f"{archive} cannot be read: {error}\n  fix: get {self.archive} again") from None
        gone = [name for name in names if name not in found]
        if gone:
            self._refuse_pickles(archive, archive.name)
            raise EvenstepError(f"{archive} holds no {gone[0]}\n  fix: give {self.archive}, the binary version")
        return [(name, found[name]) for name in names]

    def _missing(self, path: Path) -> None:
        for name in self.pickles:
            if (path / name).exists():
                self._refuse_pickles(path / name, name)
        raise EvenstepError(
            f"{path} has no {self.name}\n"
            f"  fix: put {self.archive} there (www.cs.toronto.edu/~kriz/cifar.html), packed or unpacked; nothing is downloaded"
        )

    def _refuse_pickles(self, path: Path, name: str) -> None:
        if name in self.pickles:
            raise EvenstepError(
                f'{path} is the "python version" of {self.name}: pickles, which may run any code when they are read\n'
                f"  fix: get the binary version, {self.archive}"
            )

    def _records(self, name: str, data: bytearray) -> torch.Tensor:
        size = self.label_bytes + 3 * 32 * 32
        if len(data) == 0 or len(data) % size:
            raise EvenstepError(f"{name} has {len(data)} bytes, which are no whole records of {size}: it is damaged")
        records = torch.frombuffer(data, dtype=torch.uint8).view(-1, size)
        most = int(records[:, self.label_bytes - 1].max())
        if most >= self.classes:
            raise EvenstepError(
                f"{name} has a label of {most} where {self.name} has {self.classes} classes: it is damaged"
            )
        return records


class CIFAR10(_CIFAR):
    """CIFAR-10's 50,000 training images, or the 10,000 for tests, from its *binary* version (Krizhevsky 2009).

    path: a folder with data_batch_1.bin … test_batch.bin, one that has these in cifar-10-batches-bin, or
    cifar-10-binary.tar.gz itself. A sample is (3 × 32 × 32 floats from 0 to 1, the class); transform is applied to the image.
    All pixels are kept in memory (147 MiB) as `images`, bytes, beside `labels`.
    """

    name, folder, archive = "CIFAR-10", "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
    pickles = ("cifar-10-python.tar.gz", "cifar-10-batches-py", "data_batch_1", "test_batch")
    classes, label_bytes = 10, 1

    def __init__(
        self, path: Place, train: bool = True, *, transform: Callable[[torch.Tensor], Any] | None = None
    ) -> None:
        super().__init__(path, train, 0, transform)

    @staticmethod
    def _names(train: bool) -> list[str]:
        return [f"data_batch_{number}.bin" for number in range(1, 6)] if train else ["test_batch.bin"]


class CIFAR100(_CIFAR):
    """CIFAR-100, the same way: train.bin and test.bin, in cifar-100-binary, or cifar-100-binary.tar.gz. coarse=True: the 20
    groups of classes as labels, instead of the 100 classes."""

    name, folder, archive = "CIFAR-100", "cifar-100-binary", "cifar-100-binary.tar.gz"
    pickles = ("cifar-100-python.tar.gz", "cifar-100-python", "train", "test")
    classes, label_bytes = 100, 2

    def __init__(
        self,
        path: Place,
        train: bool = True,
        *,
        coarse: bool = False,
        transform: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__(path, train, 0 if coarse else 1, transform)

    @staticmethod
    def _names(train: bool) -> list[str]:
        return ["train.bin" if train else "test.bin"]
