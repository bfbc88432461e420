"""`evenstep ckpt diff`: what two checkpoints have that is not the same, and what it says of bad ones."""

from __future__ import annotations

import json
import pathlib
import re
import resource
import shutil
from typing import Any

import pytest
import torch
from ckpt_samples import STATE, ckpt, forge, save

from evenstep._core import EvenstepError
from evenstep.checkpoint_files import MANIFEST, TensorFile, read_manifest, verify
from evenstep.checkpoint_keeping import Keep, newest_checkpoint, retain
from evenstep.checkpoint_order import order_of

MODEL = {"w": torch.arange(6.0).reshape(2, 3), "flags": torch.tensor([True, False]), "half": torch.ones(3).bfloat16()}


def report(program: pathlib.Path, *arguments: object) -> tuple[int, dict[str, Any]]:
    done = ckpt(program, "diff", "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


def test_the_same_is_the_same(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    files = {"model.safetensors": MODEL, "random.safetensors": {"nan": torch.tensor([float("nan")])}}
    a, b = save(tmp_path / "a", files), save(tmp_path / "b", files)
    done = ckpt(program, "diff", a, b)
    assert (done.returncode, done.stdout) == (0, "the same: 4 tensors and all settings\n")
    assert report(program, a, b)[1]["same_layout"]
    code, told = report(program, a / "model.safetensors", b)
    assert code == 0 and told["same"] and told["same_tensors"] == 3


def test_every_difference_is_told(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    other = {**MODEL, "w": MODEL["w"] + torch.tensor([0, 0, 0.5]), "half": torch.ones(3), "more": torch.zeros(2, 0)}
    del other["flags"]
    a = save(tmp_path / "a", {"model.safetensors": MODEL, "optimizer.safetensors": {"m": torch.ones(2)}})
    settings = {**STATE, "step": 8, "optimizers": {"optimizer": {"groups": [{"lr": 0.1}], "file": "model.safetensors"}}}
    b = save(tmp_path / "b", {"model.safetensors": other}, settings)
    code, told = report(program, a, b)
    assert code == 1 and not told["same"]
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert set(by_name) == {"w", "flags", "half", "more", "m"}
    assert by_name["w"]["different"] == 2 and by_name["w"]["largest_difference"] == 0.5
    assert by_name["w"]["largest_relative_difference"] == pytest.approx(0.5 / 2.5)
    assert by_name["w"]["relative_norm"] == pytest.approx(float((other["w"] - MODEL["w"]).norm() / MODEL["w"].norm()))
    assert by_name["half"]["a"]["dtype"] == "BF16" and by_name["half"]["b"] == {"dtype": "F32", "shape": [3]}
    assert by_name["half"]["different"] == 0
    assert by_name["flags"]["b"] is None and by_name["more"]["a"] is None and by_name["more"]["b"]["shape"] == [2, 0]
    assert by_name["m"]["file"] == "optimizer.safetensors" and by_name["m"]["b"] is None
    assert {"setting": "step", "a": 7, "b": 8} in told["settings"]
    assert [s["setting"] for s in told["settings"]] == ["step", "optimizers.optimizer"]
    text = ckpt(program, "diff", a, b).stdout
    assert "w: 2 of 6 values differ, by at most 0.5 (relative 0.2)" in text
    assert "half: BF16 [3] in A, F32 [3] in B; the values are the same" in text
    assert "flags: only in A (BOOL [2])" in text and "  step: 7 in A, 8 in B" in text
    assert "5 of 5 tensors and 2 settings differ" in text


def test_what_may_differ(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    a = save(tmp_path / "a", {"model.safetensors": {"w": torch.ones(4)}})
    b = save(tmp_path / "b", {"model.safetensors": {"w": torch.ones(4) * (1 + 1e-6)}}, {**STATE, "step": 9})
    assert ckpt(program, "diff", "--tensors", "--within", "1e-5", a, b).returncode == 0
    assert ckpt(program, "diff", "--tensors", "--within", "1e-7", a, b).returncode == 1
    assert ckpt(program, "diff", "--within", "1e-5", a, b).returncode == 1


@pytest.mark.parametrize("words", [["--files", "3"], ["--shard-bytes", "24"]])
def test_a_layout_alone(program: pathlib.Path, tmp_path: pathlib.Path, words: list[str]) -> None:
    """What was resharded, once and again: the tensors are the same, and so is the exit code."""
    moments = {f"optimizer/{name}/exp_avg": value.float() * 2 for name, value in MODEL.items()}
    state = {
        **STATE,
        "models": {"model": {"file": "model.safetensors", "tied": {}, "extra": {}}},
        "optimizers": {"optimizer": {"file": "optimizer.safetensors"}},
    }
    a = save(tmp_path / "a", {"model.safetensors": MODEL, "optimizer.safetensors": moments}, state)
    assert ckpt(program, "reshard", a, tmp_path / "b", *words).returncode == 0
    assert ckpt(program, "reshard", tmp_path / "b", tmp_path / "c", "--files", "1").returncode == 0
    for one, other in (("a", "b"), ("b", "a"), ("b", "c")):
        done = ckpt(program, "diff", tmp_path / one, tmp_path / other)
        assert done.returncode == 0, done
        expected = "the same: 6 tensors and all settings; only the layout differs: some lie in files of other names\n"
        assert done.stdout == expected
        code, told = report(program, tmp_path / one, tmp_path / other)
        assert code == 0 and told["same"] and not told["same_layout"] and told["tensors"] == told["settings"] == []
    code, told = report(program, a / "model.safetensors", tmp_path / "b")
    assert code == 0 and told["same_tensors"] == 3


def test_differences_in_another_layout(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """They are told under A's files; what is in both states is told where it differs."""
    state = {**STATE, "models": {"model": {"file": "model.safetensors", "tied": {}, "extra": {}}}}
    a = save(tmp_path / "a", {"model.safetensors": MODEL, "random.safetensors": {"r": torch.ones(1)}}, state)
    other = {**MODEL, "w": MODEL["w"] + 1, "more": torch.zeros(1)}
    del other["flags"]
    first = save(tmp_path / "first", {"model.safetensors": other, "random.safetensors": {"r": torch.ones(1)}}, state)
    assert ckpt(program, "reshard", first, tmp_path / "b", "--files", "2").returncode == 0
    code, told = report(program, a, tmp_path / "b")
    assert code == 1 and not told["same"] and not told["same_layout"] and told["settings"] == []
    by_name = {tensor["name"]: tensor for tensor in told["tensors"]}
    assert set(by_name) == {"w", "flags", "more"} and told["same_tensors"] == 2
    assert by_name["w"]["file"] == by_name["flags"]["file"] == "model.safetensors"
    assert by_name["more"]["file"].startswith("model-0000") and by_name["more"]["a"] is None
    text = ckpt(program, "diff", a, tmp_path / "b").stdout
    assert "3 of 5 tensors and 0 settings differ; some lie in files of other names" in text
    code, told = report(program, a, first)
    assert code == 1 and told["same_layout"]


@pytest.mark.parametrize(("hard", "code", "words"), [(None, 0, ""), (80, 5, "open files are needed")])
def test_more_files_than_may_be_open(
    program: pathlib.Path, tmp_path: pathlib.Path, hard: int | None, code: int, words: str
) -> None:
    """The soft limit is raised as far as the hard one lets it."""
    state = {**STATE, "models": {"model": {"file": "model.safetensors", "tied": {}, "extra": {}}}}
    a = save(tmp_path / "a", {"model.safetensors": {str(i): torch.ones(1) for i in range(60)}}, state)
    b = tmp_path / "b"
    assert ckpt(program, "reshard", a, b, "--files", "60").returncode == 0
    assert len(list(b.glob("model-*.safetensors"))) == 60
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1] if hard is None else hard

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (80, most))

    done = ckpt(program, "diff", b, shutil.copytree(b, tmp_path / "c"), preexec_fn=limit)
    assert done.returncode == code and words in done.stderr, done


def test_settings_of_a_newer_list(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    a = save(tmp_path / "a", {"model.safetensors": MODEL}, {**STATE, "extra": {"losses": [1, 2], "name": None}})
    b = save(tmp_path / "b", {"model.safetensors": MODEL}, {**STATE, "extra": {"losses": [1, 2.5, 3]}})
    code, told = report(program, a, b)
    assert code == 1 and told["settings"] == [
        {"setting": "extra.losses.1", "a": 2, "b": 2.5},
        {"setting": "extra.losses.2", "b": 3},
        {"setting": "extra.name", "a": None},
    ]


@pytest.mark.parametrize(("words", "code"), [(["a"], 2), (["a", "a", "a"], 2), (["a", "none"], 3), (["a", "."], 3)])
def test_bad_arguments(program: pathlib.Path, tmp_path: pathlib.Path, words: list[str], code: int) -> None:
    save(tmp_path / "a", {"model.safetensors": MODEL})
    done = ckpt(program, "diff", *words, cwd=tmp_path)
    assert done.returncode == code and done.stderr.startswith("evenstep: ") and "fix:" in done.stderr


FORGED = [
    (
        '"name": "model.safetensors"',
        '"name": "../model.safetensors"',
        6,
        "../model.safetensors. .*no name of a file of its folder",
    ),
    ('"name": "model.safetensors"', '"name": "/etc/passwd"', 6, "/etc/passwd. .*no name of a file of its folder"),
    ('"name": "model.safetensors"', '"name": ".."', 6, "no name of a file of its folder"),
    ('"bytes": ', '"bytes": 9223372036854775808, "was": ', 6, "manifest.json"),
    ('"bytes": ', '"bytes": 9223372036854775807, "was": ', 6, "number of checksums .*model.safetensors"),
    ('"bytes": ', '"bytes": -1, "was": ', 6, "size of .*model.safetensors|model.safetensors lacks its size"),
    ('"chunk_bytes": ', '"chunk_bytes": 0, "was": ', 6, "size of .*model.safetensors|model.safetensors lacks its size"),
    ("evenstep-checkpoint-1", "evenstep-checkpoint-2", 8, "another version"),
]


@pytest.mark.parametrize(("before", "after", "code", "words"), FORGED)
def test_forged_manifests(
    program: pathlib.Path, tmp_path: pathlib.Path, before: str, after: str, code: int, words: str
) -> None:
    """By the program and by Python, which reads for es.load_checkpoint: one error each, nothing outside is opened."""
    a = save(tmp_path / "a", {"model.safetensors": MODEL})
    forge(a, before, after)
    for command in (["diff", a, a], ["verify", a], ["show", a]):
        done = ckpt(program, *command)
        told = done.stderr + done.stdout
        assert done.returncode == code, told
        assert re.search(words, told) and "Traceback" not in told
    with pytest.raises(EvenstepError, match=words):
        verify(a, read_manifest(a))


def test_another_versions_manifest_may_end_otherwise(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    a = save(tmp_path / "a", {"model.safetensors": MODEL})
    ours = (a / MANIFEST).read_text()
    for number, code, words in ((2, 8, "another version"), (1, 6, "damaged")):
        text = ours.replace("evenstep-checkpoint-1", f"evenstep-checkpoint-{number}")
        (a / MANIFEST).write_text(text.replace("manifest_checksum", "signed"))
        done = ckpt(program, "verify", a)
        assert done.returncode == code and words in done.stderr + done.stdout, done
        with pytest.raises(EvenstepError, match=words):
            read_manifest(a)


ODD: list[tuple[str, Any]] = [
    *((name, value) for name in ("models", "optimizers", "objects", "random") for value in ([], "x", 7, None)),
    *((name, {"model": value}) for name in ("models", "optimizers") for value in ([], "x", None, {}, {"files": 3})),
    ("models", {"model": ["model.safetensors"]}),
    ("models", {"model": {"files": [["model.safetensors"]]}}),
    ("models", {"model": {"file": {}}}),
    *(("step", value) for value in ("7", None, 1.5, True, -1, [])),
    *(("lineage", value) for value in (7, None, [], {})),
]


@pytest.mark.parametrize(("name", "value"), ODD)
def test_manifests_of_odd_types(tmp_path: pathlib.Path, name: str, value: Any) -> None:
    """Made up, with a right checksum: an error of their own, and passed over beside others."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    saved = {"model": {"file": "model.safetensors"}}
    good = save(folder / "step-00000001", {"model.safetensors": MODEL}, {**STATE, "lineage": "ab", "models": saved})
    odd = save(folder / "step-00000002", {"model.safetensors": MODEL}, {**STATE, "lineage": "ab", name: value})
    with pytest.raises(EvenstepError, match=r"is damaged: "):
        read_manifest(odd)
    assert newest_checkpoint(folder) == good
    newest = save(folder / "step-00000003", {"model.safetensors": MODEL}, {**STATE, "step": 9, "lineage": "ab"})
    assert retain(newest, Keep(1), "ab", None) == newest
    assert not good.exists() and odd.exists()


def test_manifests_of_odd_forms(tmp_path: pathlib.Path) -> None:
    a = save(tmp_path / "a", {"model.safetensors": MODEL})
    text = (a / "manifest.json").read_text()
    created = json.loads(text)["created"]
    deep = "[" * 100_000 + "]" * 100_000
    odd = {
        f'"created": "{created}"': '"created": 7',
        '"format"': f'"deep": {deep}, "format"',
        '"step": 7': f'"step": {1 << 63}',
    }
    for before, after in odd.items():
        forge(a, before, after)
        with pytest.raises(EvenstepError, match=r"is damaged: "):
            read_manifest(a)
        (a / "manifest.json").write_text(text)
    forge(a, created, "some day")
    assert Keep(1, seconds=60).stays([(order_of(read_manifest(a)), 7, "a"), ("0 then", 7, "b")]) == {"a"}


def test_files_that_lie_elsewhere(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    a = save(tmp_path / "a", {"model.safetensors": MODEL})
    (a / "model.safetensors").rename(tmp_path / "away")
    (a / "model.safetensors").symlink_to("../away")
    for command in (["diff", a, a], ["verify", a]):
        done = ckpt(program, *command)
        assert done.returncode == 6 and "symbolic link" in done.stdout + done.stderr
    with pytest.raises(EvenstepError, match="symbolic link"):
        read_manifest(a)


def test_a_manifest_that_lies_elsewhere(program: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A folder may be a link, as `latest` to the newest: then its files are its own."""
    a = save(tmp_path / "a", {"model.safetensors": MODEL})
    (tmp_path / "latest").symlink_to("a")
    assert ckpt(program, "verify", tmp_path / "latest").returncode == 0
    read_manifest(tmp_path / "latest")
    (a / "manifest.json").rename(tmp_path / "away")
    (a / "manifest.json").symlink_to("../away")
    for command in (["diff", a, a], ["verify", a], ["show", a], ["convert", a, tmp_path / "out.pt"]):
        done = ckpt(program, *command)
        assert done.returncode == 6 and "manifest.json is a symbolic link" in done.stdout + done.stderr, command
    with pytest.raises(EvenstepError, match="is a symbolic link"):
        read_manifest(a)


def test_a_state_that_names_a_file_elsewhere(tmp_path: pathlib.Path) -> None:
    saved = {"model": {"file": "../away.safetensors", "tied": {}, "extra": {}}}
    a = save(tmp_path / "a", {"model.safetensors": MODEL}, {**STATE, "models": saved})
    with pytest.raises(EvenstepError, match="none of its files"):
        read_manifest(a)


@pytest.mark.parametrize(
    "offsets",
    ["[0, 9223372036854775808]", "[0, 9223372036854775807]", "[-8, 16]", "[0, 1e3]", "[16, 0]", "[0, 20]", "[8, 32]"],
)
def test_tensor_files_with_impossible_sizes(program: pathlib.Path, tmp_path: pathlib.Path, offsets: str) -> None:
    header = f'{{"w":{{"dtype":"F32","shape":[6],"data_offsets":{offsets}}}}}'.encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    done = ckpt(program, "diff", path, path)
    assert done.returncode == 6 and done.stderr.count("evenstep:") == 1, done.stderr
    with pytest.raises(EvenstepError, match="not a valid safetensors file"):
        TensorFile(path)
