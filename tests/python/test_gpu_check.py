"""The runner of `make gpu-check`, with checks of its own in place of the real ones: what it reports, and when it ends with what."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import run_jobs

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


REAL = """
    import os, sys
    tree = sys.argv[1]
    sys.path[:0] = [f"{tree}/tests/gpu", f"{tree}/examples", f"{tree}/tests/python"]
    os.environ["PYTHONPATH"] = os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])
    os.environ["EVENSTEP_CHECK_DEVICE"] = "cpu"
    import cases, random_cases, speed_cases, torch_cases

    if sys.argv[2] == "made-up":
        import fake_streams
        streams = fake_streams.stand_in_for_all()
    speed_cases.HYBRID_SIZES[:] = [1 << 16]
    for port, name in (word.split(":") for word in sys.argv[3:]):
        os.environ["MASTER_PORT"] = port  # where it ended late, the next one would still find the last one's store
        next(vars(m)[name] for m in (cases, random_cases, speed_cases, torch_cases) if name in vars(m))()
    if sys.argv[2] == "made-up":
        assert all(one.violation() == "" for one in streams), [one.violation() for one in streams]
"""


def at_own_ports(names: list[str]) -> list[str]:
    return [f"{run_jobs.free_port()}:{name}" for name in names]


def test_the_checks_that_need_no_gpu_pass(
    run_ranks: Callable[..., Any], program: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """The real ones: those for the CPU, and of those for a GPU what can be had with one made up, or with CPUs in its place."""
    ours = {"EVENSTEP_PROGRAM": str(program)}
    compiler = shutil.which("cc") or shutil.which("gcc")
    names = ["cpu_program", "cpu_collectives", "hybrid_gpu_and_cpu", "cpu_training"]
    if compiler is not None:
        library = tmp_path / "libnvtx.so"
        source = TREE / "tests" / "os" / "fake_nvtx.c"
        words = ["-std=c11", "-shared", "-fPIC", f"-I{TREE / 'tests'}", str(source), "-o", str(library), "-lpthread"]
        subprocess.run([compiler, *words], check=True)
        ours["EVENSTEP_NVTX_LIBRARY"] = str(library)
        names.insert(0, "nvtx_ranges")
    ranks = run_ranks(REAL, 2, args=(str(TREE), "cpu", *at_own_ports(names)), env=ours)
    rows = [json.loads(line[4:]) for line in ranks[0].stdout.splitlines() if line.startswith("ROW ")]
    assert rows[-1]["relative_difference"] < 1e-9, rows
    legs = next(row for row in rows if "hybrid_us" in row)
    slowest = max(legs[f"{name}_us"] for name in ("host", "down", "up"))
    assert legs[f"{legs['slower_leg']}_us"] == slowest and legs["of_its_speed"] > 0, legs
    assert compiler is None or rows[0] == {"nvtx": "its library"}, rows


def test_the_checks_of_torch_s_wrappers_pass_over_the_made_up_nccl(
    run_ranks: Callable[..., Any], tmp_path: pathlib.Path
) -> None:
    fake_streams = pytest.importorskip("fake_streams")
    fake = fake_streams.build_fake(tmp_path)
    if fake is None:
        pytest.skip("no C compiler for the made-up NCCL")
    torch = pytest.importorskip("torch")
    from evenstep.hosts import ucx_state

    names = ["random_calls_pair", "random_calls_by_legs", "through_host_pair", "pipelines_pair"]
    if hasattr(torch.cpu.Stream, "record_event"):  # 2.6's fully_shard trains on no CPU
        names.append("wrappers_pair")
    made_up = {name: str(fake) for name in ("EVENSTEP_NCCL_LIBRARY", "EVENSTEP_CUDA_LIBRARY")}
    env = {**made_up, "EVENSTEP_FAKE_GPUS": "4", "UCX_TLS": "tcp,self", "EVENSTEP_COMM_COSTS": "off"}
    ranks = run_ranks(REAL, 2, args=(str(TREE), "made-up", *at_own_ports(names)), env=env)
    rows = [json.loads(line[4:]) for line in ranks[0].stdout.splitlines() if line.startswith("ROW ")]
    assert [row["by"] for row in rows if "by" in row] == ["DeviceCollectives"] + ["LegCollectives"] * bool(
        ucx_state()[0]
    )
