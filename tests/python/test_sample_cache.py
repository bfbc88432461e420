"""es.SampleCache: each sample is decoded once a host, and comes back as it was, whatever becomes of the memory."""

from __future__ import annotations

import errno
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import evenstep as es
from evenstep import sample_cache
from evenstep.sample_record import pack, unpack


class Decoded(Dataset):
    """Counts what is decoded."""

    def __init__(self, count: int = 12, width: int = 8) -> None:
        self.count, self.width, self.decoded = count, width, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.decoded += 1
        return torch.full((self.width,), float(index)), index


class Many(Decoded):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def alike(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        one, other = (each.resolve_conj().reshape(-1).view(torch.uint8) for each in (one, other))
        return same and one.equal(other)
    if isinstance(one, (numpy.ndarray, numpy.generic)):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(one == other)


SAMPLE = {
    "image": torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4).transpose(0, 2),
    "weights": [
        torch.randn(5, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.empty(0, 3),
        torch.tensor(2 - 3j).conj(),
    ],
    "label": 3,
    ("a", 1): (numpy.float32(0.5), numpy.arange(7)[::2], numpy.array("words"), numpy.zeros((0, 2))),
    "rest": (None, True, 1 << 80, "ä", b"\0", 1.5, 2j),
}


def test_samples_come_back_as_they_were() -> None:
    record = bytearray(b"".join(pack(SAMPLE)))
    assert alike(unpack(record), {**SAMPLE, "image": SAMPLE["image"].contiguous()})
    unpack(record)["image"].fill_(0)  # of this caller


class Picture:
    """What is asked of an image of PIL's, and of PIL.Image."""

    def __init__(self, mode: str, size: tuple[int, int], data: bytes) -> None:
        self.mode, self.size, self._data = mode, size, data
        self.palette: Any = None
        self.info: dict[str, Any] = {}

    def tobytes(self) -> bytes:
        return self._data

    def putpalette(self, data: bytes, mode: str) -> None:
        self.palette = SimpleNamespace(mode=mode, data=data)

    def getpalette(self, mode: str) -> list[int]:
        assert mode == self.palette.mode
        return list(self.palette.data)


@pytest.mark.parametrize("real", [False, pytest.param(True, marks=pytest.mark.more)])
@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "I;16"])
def test_images_come_back_as_they_were(monkeypatch: pytest.MonkeyPatch, real: bool, mode: str) -> None:
    """Of PIL where it is installed, and of a stand-in for it."""
    if real:
        module = pytest.importorskip("PIL.Image")
    else:
        module = SimpleNamespace(Image=Picture, frombytes=Picture)
        monkeypatch.setitem(sys.modules, "PIL", SimpleNamespace(Image=module))
        monkeypatch.setitem(sys.modules, "PIL.Image", module)
    bits = {"RGB": 24, "1": 1, "I;16": 16}.get(mode, 8)
    image = module.frombytes(mode, (8, 3), bytes(range(3 * bits)))
    if mode == "P":
        image.putpalette(bytes(range(12)), "RGB")
    elif mode in ("RGB", "L"):  # as of a frame before it in an animated GIF
        image.palette = importlib.import_module("PIL.ImagePalette").ImagePalette("RGB") if real else SimpleNamespace()
    image.info.update(exif=b"Exif", dpi=(72, 72), transparency=3, odd=object())
    (found, label) = unpack(bytearray(b"".join(pack((image, 7)))))
    assert label == 7 and type(found) is module.Image and (found.mode, found.size) == (mode, (8, 3))
    assert found.tobytes() == image.tobytes() and found.info == {"exif": b"Exif", "dpi": (72, 72), "transparency": 3}
    assert mode == "P" or found.palette is None
    assert mode != "P" or found.getpalette("RGB") == image.getpalette("RGB")


@pytest.mark.more
def test_an_image_of_a_file(tmp_path: Path) -> None:
    """It is loaded when it is first asked for; with a palette that has transparency, too."""
    module = pytest.importorskip("PIL.Image")
    module.frombytes("RGBA", (8, 3), bytes(range(96))).quantize(8).save(tmp_path / "a.png")
    with module.open(tmp_path / "a.png") as image:
        found = unpack(bytearray(b"".join(pack(image))))
        assert type(found) is module.Image and found.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


@pytest.mark.parametrize(
    "sample", [{1}, torch.ones(1, requires_grad=True), torch.eye(2).to_sparse(), numpy.array([object()]), Decoded()]
)
def test_what_cannot_be_kept_is_named(sample: Any) -> None:
    with pytest.raises(es.EvenstepError, match=r"was given a sample with a .* in it"):
        pack((1, [sample]))


@pytest.mark.parametrize("kind", [Decoded, Many])
@pytest.mark.parametrize("workers", [0, 1])
def test_each_is_decoded_once(kind: type[Decoded], workers: int) -> None:
    cache = es.SampleCache(kind(), 1 << 20)
    loader = DataLoader(cache, batch_size=5, num_workers=workers)
    epochs = [torch.cat([x[:, 0] for x, _ in loader]).tolist() for _ in range(3)]
    assert epochs == [list(range(12))] * 3
    assert cache.kept_samples == 12
    assert cache.dataset.decoded == (0 if workers else 12)
    x, _ = cache[3]
    x.zero_()
    assert cache[3][0].tolist() == [3.0] * 8
    assert cache.width == 8  # the data set's
    assert cache.dataset.decoded == (0 if workers else 12)


@pytest.mark.parametrize("kind", [Decoded, Many])
@pytest.mark.parametrize("numbers", [numpy.random.default_rng(0).permutation(12), torch.randperm(12)])
def test_whole_numbers_of_any_kind_name_a_sample(kind: type[Decoded], numbers: Any) -> None:
    cache = es.SampleCache(kind(), 1 << 20)
    loader = DataLoader(cache, batch_size=5, sampler=numbers)
    for _ in range(2):
        assert torch.cat([x[:, 0] for x, _ in loader]).tolist() == numbers.tolist()
    assert cache.kept_samples == cache.dataset.decoded == 12
    assert cache[numpy.uint8(3)][0].tolist() == [3.0] * 8 and cache.dataset.decoded == 12
    rows = es.SampleCache(torch.arange(4), 1 << 20)
    for index in (torch.tensor([2]), torch.tensor(True), True, numpy.array([2]), slice(1, 2)):
        assert rows[index].shape == torch.arange(4)[index].shape
    assert rows.kept_samples == 0


def test_what_does_not_fit_is_not_kept() -> None:
    cache = es.SampleCache(Decoded(count=10, width=1000), 64 + 192 + 3 * 4096 + 100)
    for _ in range(2):
        assert [int(cache[index][0][0]) for index in range(10)] == list(range(10))
    assert cache.kept_samples == 3
    assert cache.used_bytes <= cache.max_bytes
    assert cache.dataset.decoded == 10 + 7
    assert os.fstat(cache._fd).st_size == cache.max_bytes


def test_a_host_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = es.SampleCache(Decoded(), 1 << 20)
    write = os.pwritev

    def fails(fd: int, pieces: Any, where: int) -> int:
        if len(pieces) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, pieces, where)

    monkeypatch.setattr(os, "pwritev", fails)
    assert [int(cache[index][1]) for index in (0, 0, 1)] == [0, 0, 1]
    assert cache.kept_samples == 0


def test_wrong_caches() -> None:
    with pytest.raises(ValueError, match="the list of 12 samples alone needs 256 bytes"):
        es.SampleCache(Decoded(), 200)
    with pytest.raises(es.EvenstepError, match="bytes of memory left"):
        es.SampleCache(Decoded(), 1 << 60)
    with pytest.raises(es.EvenstepError, match="needs a data set with a length"):
        es.SampleCache(iter(()), 1 << 20)
    cache = es.SampleCache(Decoded(), 1 << 20)
    with pytest.raises(es.EvenstepError, match=r"sample with a .*Decoded in it"):
        es.SampleCache([Decoded()], 1 << 20)[0]
    assert int(cache[-1][1]) == -1  # the data set's affair
    assert cache.kept_samples == 0


def fill(cache: Any) -> None:
    """In a worker that was spawned."""
    assert [int(cache[index][1]) for index in range(12)] == list(range(12))


@pytest.mark.more
def test_a_spawned_worker_shares_it() -> None:
    cache = es.SampleCache(Decoded(), 1 << 20)
    worker = multiprocessing.get_context("spawn").Process(target=fill, args=(cache,))
    worker.start()
    worker.join(60)
    resource_tracker._resource_tracker._stop()
    assert worker.exitcode == 0
    assert cache.kept_samples == 12


def crowd(cache: Any, first: int) -> None:
    for index in range(200):
        index = (index + first) % 200
        sample, label = cache[index]
        assert label == index and bool((sample == index).all())


def test_processes_at_once() -> None:
    cache = es.SampleCache(Decoded(count=200, width=500), 1 << 20)
    context = multiprocessing.get_context("fork")
    crowds = [context.Process(target=crowd, args=(cache, first)) for first in (0, 0, 100, 150)]
    for one in crowds:
        one.start()
    for one in crowds:
        one.join(150)
    assert [one.exitcode for one in crowds] == [0] * 4
    assert cache.kept_samples == 200
    size = sum(map(len, pack(Decoded(width=500)[0])))
    assert cache.used_bytes == 64 + 200 * 16 + 200 * -(-size // 64) * 64


RANKS = """
import os
import torch
from torch.utils.data import DataLoader, Dataset
import evenstep as es
from evenstep import sample_cache

class Decoded(Dataset):
    def __len__(self): return 40
    def __getitem__(self, index):
        with open(f"decoded_{os.environ['RANK']}", "a") as log:
            log.write(f"{index}\\n")
        return torch.full((4,), float(index), dtype=torch.float64)

class Twice(Dataset):
    def __init__(self, inner): self.inner = inner
    def __len__(self): return len(self.inner)
    def __getitem__(self, index): return 2 * self.inner[index]

cache = es.SampleCache(Decoded(), 1 << 20)
loader = es.prepare(loader=DataLoader(Twice(cache), batch_size=8, shuffle=True, num_workers=1))
for epoch in range(3):
    rows = torch.cat([es.gather(x) for x in loader])
    assert sorted(rows[:, 0].tolist()) == [2.0 * index for index in range(40)]
assert cache.kept_samples == 40
es.barrier()

def refused(data, words):
    try:
        es.prepare(loader=DataLoader(data, batch_size=8))
    except es.EvenstepError as error:
        assert words in str(error) and "fix: " in str(error), error
    else:
        raise AssertionError("no error")

refused(es.SampleCache(Decoded(), (1 << 20) + 4096 * es.rank()), "caches differ in samples or max_bytes")
some = Twice(Decoded() if es.rank() else es.SampleCache(Decoded(), 1 << 20))
refused(some, "different numbers of es.SampleCache in this loader's data set: [1, 0]")

def take(self, process, fd):
    raise PermissionError("not yours")

es.SampleCache.take = take
refused(es.SampleCache(Decoded(), 1 << 20), "rank 1 cannot open rank 0's es.SampleCache: not yours")
"""


def test_the_ranks_of_a_host_share_it(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(RANKS, ranks=2)
    decoded = [int(line) for rank in range(2) for line in (tmp_path / f"decoded_{rank}").read_text().split()]
    assert sorted(decoded) == list(range(40))


class Group:
    """What a control group leaves this process."""

    def __init__(self, available: int, limit: int) -> None:
        self.available, self.limit, self.looks = available, limit, 0

    def read(self) -> tuple[int, int, int, int, str, float]:
        self.looks += 1
        return 0, 0, self.available, self.limit, "/box/one", 1.0


def test_what_a_control_group_leaves_is_not_exceeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not refuse memory: it ends who takes more."""
    group = Group(available=1 << 20, limit=1 << 24)
    monkeypatch.setattr(sample_cache, "_memory", lambda: group)
    with pytest.raises(es.EvenstepError, match="the control group /box/one has 1048576 bytes of memory left"):
        es.SampleCache(Decoded(), (1 << 20) + 1)
    cache = es.SampleCache(Decoded(count=64, width=4096), 1 << 20)
    assert int(cache[0][1]) == 0 and cache.kept_samples == 1
    group.available = (1 << 24) // 20 + 40000  # what is to stay free, and two samples more
    kept = []
    for index in range(1, 8):
        before = cache.used_bytes
        assert int(cache[index][1]) == index
        group.available -= cache.used_bytes - before
        kept.append(cache.kept_samples)
    assert kept == [2, 3, 3, 3, 3, 3, 3]
    group.available, group.looks = 1 << 30, 0
    for index in range(8, 48):
        cache[index]
    assert cache.kept_samples == 43 and group.looks == 1
