"""The runner of `make gpu-check`, with checks of its own in place of the real ones: what it reports, and when it ends with what."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import zipfile
from types import ModuleType
from typing import Any

import pytest

TREE = pathlib.Path(__file__).resolve().parents[2]

CASES = """
import json, os, signal, sys, time
rank = int(os.environ.get("RANK", "0"))
def probe(): print("ROW " + json.dumps(FACTS))
def good(): print("ROW " + json.dumps({"rank": rank}))
def wrong(): raise AssertionError("these words are kept")
def crash(): os.kill(os.getpid(), signal.SIGKILL)
def hang(): time.sleep(600)
globals()[sys.argv[1]]()
"""


@pytest.fixture
def check(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the runner over such cases; gives its exit status, report.json and report.txt."""
    specification = importlib.util.spec_from_file_location("gpu_run", TREE / "tests" / "gpu" / "run.py")
    assert specification is not None and specification.loader is not None
    module: ModuleType = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    with zipfile.ZipFile(tmp_path / "evenstep-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("evenstep.scripts/evenstep", "#!/bin/sh\n")
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--out", str(tmp_path / "report")])

    def run(facts: dict, checks: list) -> tuple[int, dict, str]:
        (tmp_path / "cases.py").write_text(f"FACTS = {facts!r}\n{CASES}")
        monkeypatch.setattr(module, "CHECKS", checks)
        code = module.main()
        folder = tmp_path / "report"
        return code, json.loads((folder / "report.json").read_text()), (folder / "report.txt").read_text()

    return run


FACTS = {"torch": "2.x", "gpus": ["A GPU"], "nccl": 23000, "torch_nccl": "2.30"}


def test_failures_are_reported_and_the_rest_goes_on(check: Any) -> None:
    checks = [("wrong", 2, "gpu", 20), ("crash", 1, "gpu", 20), ("hang", 2, "gpu", 1), ("good", 2, "pair", 20)]
    code, report, text = check(FACTS, checks)
    assert code == report["exit"] == 1
    assert [c["outcome"] for c in report["checks"]] == ["FAILED", "FAILED", "FAILED", "passed"]
    assert "these words are kept" in text and "not done after 1 s" in text
    assert report["checks"][3]["rows"] == [{"rank": 0}, {"rank": 1}]


def test_without_a_gpu_it_claims_nothing(check: Any) -> None:
    checks = [("good", 1, "", 20), ("good", 1, "gpu", 20), ("good", 2, "pair", 20)]
    code, _report, text = check({**FACTS, "gpus": []}, checks)
    assert code == 3
    assert "no GPU: 2 tests not run" in text and "1 passed, 0 failed, 2 not run" in text
    code, *_ = check({**FACTS, "gpus": []}, [("wrong", 1, "", 20), ("good", 1, "gpu", 20)])
    assert code == 1


def test_what_cannot_run_says_why(check: Any) -> None:
    checks = [("good", 2, "pair", 20), ("good", 1, "torch-nccl", 20), ("good", 1, "gpu", 20)]
    code, report, _ = check({**FACTS, "nccl": 22703, "torch_nccl": ""}, checks)
    assert code == 0
    reasons = [c["why"] for c in report["checks"]]
    assert reasons == [
        "one GPU, and NCCL 2.27 takes one rank a GPU (2.30 takes several)",
        "this torch has no NCCL",
        "",
    ]
    code, report, _ = check({**FACTS, "nccl": 0, "nccl_error": "NCCL was not found"}, [("good", 1, "gpu", 20)])
    assert code == 3 and "none of the 1 tests for it ran" in report["verdict"]
    assert report["checks"][0]["why"] == "our NCCL engine does not start: NCCL was not found"
