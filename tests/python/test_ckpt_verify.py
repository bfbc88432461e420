"""`evenstep ckpt verify`: which checkpoints a word names."""

from __future__ import annotations

import json
from pathlib import Path

from ckpt_samples import ckpt
from run_jobs import write_checkpoint


def test_a_run_or_a_folder_means_all_its_checkpoints(program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/gpt/checkpoints"
    for step in (1, 2):
        write_checkpoint(folder / f"step-{step:08d}", tensor=True)
    (folder / "step-00000003.evenstep.partial").mkdir()
    (tmp_path / "runs/none").mkdir()
    for word in ("gpt", "runs/gpt", "runs/gpt/", folder):
        done = ckpt(program, "verify", word, cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.count(": whole\n") == 2, done
        assert "checkpoints/step-00000002: whole" in done.stdout and "partial" not in done.stdout
    for words in (["gpt"], ["runs/gpt"], []):
        done = ckpt(program, "ls", *words, cwd=tmp_path)
        assert done.stdout.count("runs/gpt/checkpoints/step-") == 3 and "unfinished" in done.stdout, done
    damaged = folder / "step-00000001/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    done = ckpt(program, "verify", "gpt", "runs/gpt/checkpoints/step-00000002", "--json", cwd=tmp_path)
    assert done.returncode == 6, done
    assert [(Path(one["path"]).name[-1], one["whole"]) for one in json.loads(done.stdout)] == [
        ("1", False),
        ("2", True),
        ("2", True),
    ]
    for word, code, said in (
        ("none", 3, "run runs/none has no checkpoint"),
        ("gone", 3, "neither folder gone nor run runs/gone exists"),
        ("runs/gpt/checkpoints/step-00000009", 3, "checkpoint runs/gpt/checkpoints/step-00000009 does not exist"),
        ("runs/none", 3, "runs/none is not a checkpoint"),
    ):
        done = ckpt(program, "verify", word, cwd=tmp_path)
        assert (done.returncode, said in done.stderr) == (code, True), done
    assert json.loads(ckpt(program, "verify", "none", "--json", cwd=tmp_path).stdout)[0]["whole"] is False


def test_a_lost_manifest_is_told_and_names_are_clean(program: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs/gpt/checkpoints"
    for name in ("best\x1b[31m", "step-00000001", "step-00000002"):
        write_checkpoint(folder / name, tensor=True)
    (folder / "step-00000001/manifest.json").unlink()
    done = ckpt(program, "verify", "gpt", cwd=tmp_path)
    assert done.returncode == 3 and "step-00000001 is not a checkpoint: it has no manifest.json" in done.stderr, done
    assert "checkpoints/best?[31m: whole" in done.stdout and "step-00000002: whole" in done.stdout
    shown = json.loads(ckpt(program, "verify", "gpt", "--json", cwd=tmp_path).stdout)
    assert [one["whole"] for one in shown] == [True, False, True]
