"""evenstep.data: samples that follow from seed and index, and CIFAR's binary files as they are published."""

from __future__ import annotations

import io
import pathlib
import pickle
import tarfile

import pytest
import torch

import evenstep as es
from evenstep import data


def test_samples_follow_from_seed_and_index_alone():
    for make in (
        lambda seed: data.SyntheticImages(20, 3, 8, seed=seed),
        lambda seed: data.SyntheticText(20, 9, 50, seed=seed),
        lambda seed: data.SyntheticText(20, 9, 50, mask=50, seed=seed),
    ):
        one, same, other = make(7), make(7), make(8)
        torch.manual_seed(1)  # nobody else's generator is used
        late = [same[index] for index in reversed(range(20))][::-1]
        for index in range(20):
            for a, b in zip(one[index], late[index]):
                assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        assert not torch.equal(one[3][0], other[3][0])
        assert not torch.equal(one[3][0], one[4][0])
        assert torch.equal(one[-1][0], one[19][0])
        with pytest.raises(IndexError):
            one[20]
        assert len(list(one)) == len(one) == 20  # a loop over it ends


def test_images_are_told_apart_by_their_class():
    images = data.SyntheticImages(40, 4, 16, noise=0.1)
    assert [images[index][1] for index in range(8)] == [0, 1, 2, 3] * 2
    assert images[0][0].shape == (3, 16, 16)
    alike = (images[0][0] - images[4][0]).abs().mean()
    apart = (images[0][0] - images[1][0]).abs().mean()
    assert alike < 0.3 * apart


def test_text_is_continued_and_mostly_follows():
    text = data.SyntheticText(200, 50, 1000)
    follows = total = 0
    for words, targets in text:
        assert torch.equal(words[1:], targets[:-1]) and int(words.max()) < 1000
        follows += int(((31 * words + 7) % 1000 == targets).sum())
        total += len(words)
    assert 0.77 < follows / total < 0.83


def test_masked_words_are_as_in_the_paper():
    taken = masked = kept = total = 0
    for words, targets in data.SyntheticText(300, 64, 1000, mask=1000):
        gone = targets != -100
        assert gone.any()
        taken += int(gone.sum())
        masked += int((words[gone] == 1000).sum())
        kept += int((words[gone] == targets[gone]).sum())
        total += len(words)
        assert not (words[~gone] == 1000).any()
    assert 0.14 < taken / total < 0.18
    assert 0.77 < masked / taken < 0.83 and 0.07 < kept / taken < 0.13


def test_sizes_that_there_are_not():
    with pytest.raises(ValueError, match="classes=0"):
        data.SyntheticImages(classes=0)
    with pytest.raises(ValueError, match="length=0"):
        data.SyntheticText(length=0)
    with pytest.raises(ValueError, match="mask=-1"):
        data.SyntheticText(mask=-1)


# ---- CIFAR ----


def record(labels: list[int], first: int) -> bytes:
    """Planes of one value each: first, first + 1, first + 2."""
    return bytes(labels) + b"".join(bytes([first + plane]) * 1024 for plane in range(3))


FILES10 = {f"data_batch_{n}.bin": record([n], 10 * n) + record([9 - n], 5) for n in range(1, 6)}
FILES10["test_batch.bin"] = record([7], 100)


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def pack(path: pathlib.Path, folder: str, files: dict[str, bytes]) -> pathlib.Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(params=["folder", "below", "archive", "archive below"])
def cifar10(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> pathlib.Path:
    if request.param == "folder":
        return write(tmp_path / "here", FILES10)
    if request.param == "below":
        write(tmp_path / "cifar-10-batches-bin", FILES10)
        return tmp_path
    packed = pack(tmp_path / "cifar-10-binary.tar.gz", "cifar-10-batches-bin", FILES10)
    return packed if request.param == "archive" else tmp_path


def test_cifar_10(cifar10):
    images = data.CIFAR10(cifar10)
    assert len(images) == 10 and images.labels.tolist() == [1, 8, 2, 7, 3, 6, 4, 5, 5, 4]
    image, label = images[2]
    assert label == 2 and image.shape == (3, 32, 32)
    assert [round(255 * float(plane.mean())) for plane in image] == [20, 21, 22]
    tested = data.CIFAR10(str(cifar10), train=False, transform=lambda one: one.mean())
    assert len(tested) == 1 and tested[0][1] == 7
    assert float(tested[0][0]) == pytest.approx(101 / 255)


def test_cifar_100(tmp_path, monkeypatch):
    files = {"train.bin": record([3, 88], 0) + record([4, 99], 1), "test.bin": record([19, 1], 2)}
    write(tmp_path / "cifar-100-binary", files)
    assert [data.CIFAR100(tmp_path)[n][1] for n in range(2)] == [88, 99]
    assert [data.CIFAR100(tmp_path, coarse=True)[n][1] for n in range(2)] == [3, 4]
    assert data.CIFAR100(tmp_path, train=False)[0][1] == 1
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(data.CIFAR100("~/cifar-100-binary")) == 2  # as torchvision takes it


def test_the_python_version_is_refused_unread(tmp_path):
    class Trap:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "sprung",)

    bad = {"data_batch_1": pickle.dumps(Trap()), "test_batch": pickle.dumps(Trap())}
    write(tmp_path / "cifar-10-batches-py", bad)
    folder = tmp_path / "other"
    folder.mkdir()
    archive = pack(folder / "cifar-10-python.tar.gz", "cifar-10-batches-py", bad)
    for place in (tmp_path, tmp_path / "cifar-10-batches-py", folder, archive):
        with pytest.raises(es.EvenstepError, match=r"pickles.*(?s:.*)binary version, cifar-10-binary\.tar\.gz"):
            data.CIFAR10(place)
    assert not (tmp_path / "sprung").exists()


def test_what_is_missing_or_damaged_is_named(tmp_path):
    with pytest.raises(es.EvenstepError, match=r"has no CIFAR-10(?s:.*)nothing is downloaded"):
        data.CIFAR10(tmp_path)
    folder = write(tmp_path / "some", {"data_batch_1.bin": FILES10["data_batch_1.bin"]})
    with pytest.raises(es.EvenstepError, match=r"data_batch_2\.bin is missing"):
        data.CIFAR10(folder)
    write(folder, {"test_batch.bin": FILES10["test_batch.bin"][:-1]})
    with pytest.raises(es.EvenstepError, match=r"test_batch\.bin has 3072 bytes"):
        data.CIFAR10(folder, train=False)
    write(folder, {"test_batch.bin": record([10], 0)})
    with pytest.raises(es.EvenstepError, match="label of 10 where CIFAR-10 has 10"):
        data.CIFAR10(folder, train=False)
    whole = pack(tmp_path / "cut.tar.gz", "cifar-10-batches-bin", FILES10).read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(es.EvenstepError, match=r"cut\.tar\.gz (cannot be read|holds no)"):
        data.CIFAR10(tmp_path / "cut.tar.gz")
    other = pack(tmp_path / "other.tar.gz", "elsewhere", {"readme.txt": b"x"})
    with pytest.raises(es.EvenstepError, match=r"holds no data_batch_1\.bin"):
        data.CIFAR10(other)
