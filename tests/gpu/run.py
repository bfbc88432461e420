"""Checks Evenstep on a machine with a GPU and without a network: `python run.py` in the folder that `make gpu-check` made.

Needs Python 3.9 or newer with torch 2.6 or newer; nothing is installed, nothing is written outside this folder. Takes up
to five minutes. Every check runs in processes of its own: one that fails, hangs or crashes is reported and the rest go on.
Writes report.json and report.txt. Ends with 0 (a GPU is there and every check that could run passed), 1 (a check failed),
2 (the checks cannot start) or 3 (no GPU check was run, for want of a GPU mostly;
those for the CPU passed).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import suppress

HERE = pathlib.Path(__file__).resolve().parent
BUDGET_SECONDS = 285.0
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"

# name, ranks, needs, seconds that it may take. Needs: "" (a CPU), "gpu", "pair" (two ranks on GPUs: two GPUs, or an NCCL
# that takes two ranks on one), "torch-nccl", "torch-pair" (two GPUs and a torch with NCCL).
CHECKS = [
    ("cpu_program", 1, "", 30),
    ("cpu_collectives", 2, "", 60),
    ("cpu_training", 2, "", 90),
    ("gpu_listed", 1, "gpu", 40),
    ("gpu_profiled", 1, "gpu", 60),
    ("nccl_alone", 1, "gpu", 60),
    ("nccl_pair", 2, "pair", 60),
    ("backend_alone", 1, "gpu", 60),
    ("backend_pair", 2, "pair", 90),
    ("through_host_alone", 1, "gpu", 60),
    ("through_host_pair", 2, "pair", 60),
    ("through_host_does_not_wait", 1, "gpu", 60),
    ("wrappers_pair", 2, "pair", 90),
    ("pipelines_pair", 2, "pair", 90),
    ("random_calls_pair", 2, "pair", 60),
    ("random_calls_by_legs", 2, "gpu", 60),
    ("host_does_not_wait", 1, "gpu", 60),
    ("late_rank", 2, "pair", 60),
    ("dead_rank", 2, "pair", 60),
    ("stopped_rank", 2, "pair", 60),
    ("different_calls", 2, "pair", 60),
    ("calls_on_the_timeline", 1, "gpu", 40),
    ("nvtx_ranges", 1, "gpu", 30),
    ("train_gpu", 1, "gpu", 60),
    ("train_gpu_pair", 2, "gpu", 90),
    ("train_own_nccl_pair", 2, "pair", 90),
    ("train_gpu_and_cpu", 2, "gpu", 90),
    ("hybrid_gpu_and_cpu", 2, "gpu", 60),
    ("train_legs", 2, "torch-nccl", 90),
    ("train_legs_four", 4, "torch-pair", 90),
    ("bitwise_pair", 2, "gpu", 90),
    ("bench_alone", 1, "gpu", 60),
    ("bench_pair", 2, "pair", 60),
    ("bench_torch_alone", 1, "torch-nccl", 60),
    ("bench_torch_pair", 2, "torch-pair", 60),
]


def unpack(wheel: pathlib.Path, site: pathlib.Path) -> None:
    """A wheel is an archive: unpacked, it can be imported; the program lies in it, too."""
    if site.exists():
        shutil.rmtree(site)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for program in site.glob("evenstep.scripts/*"):
        program.chmod(0o755)


def free_port() -> int:
    """None that the kernel gives to who asks for any, as others do before it is bound."""
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(10000, first) if first > 20000 else 0))
            return int(probe.getsockname()[1])


class Runner:
    def __init__(self, site: pathlib.Path, folder: pathlib.Path) -> None:
        self.site, self.folder = site, folder
        self.began = time.monotonic()
        self.facts: dict = {}
        self.results: list[dict] = []

    def environment(self, rank: int, ranks: int, port: int) -> dict:
        words = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.site), str(HERE), os.environ.get("PYTHONPATH", "")])),
            "EVENSTEP_PROGRAM": str(next(self.site.glob("evenstep.scripts/evenstep"), "")),
            "PYTHONUNBUFFERED": "1",
        }
        if ranks > 1 or rank < 0:
            words.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), RANK=str(rank))
            words.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
        return words

    def run_ranks(self, name: str, ranks: int, seconds: float) -> tuple[list[int], list[str], bool]:
        """Exit statuses and outputs; all are killed when the time is up."""
        port = free_port()
        files = [open(self.folder / f"{name}.{rank}.log", "w+") for rank in range(ranks)]  # noqa: SIM115
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / "cases.py"), name],
                stdout=files[rank],
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self.environment(rank, ranks, port),
                cwd=self.folder,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        until = time.monotonic() + seconds
        late = False
        while any(process.poll() is None for process in processes):
            if time.monotonic() > until:
                late = True
                break
            time.sleep(0.05)
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        outputs = []
        for file in files:
            file.seek(0)
            outputs.append(file.read())
            file.close()
        return [process.returncode for process in processes], outputs, late

    def missing(self, needs: str) -> str:
        """Why a check cannot run here; "" where it can."""
        gpus = self.facts.get("gpus", [])
        if needs and not gpus:
            return "no GPU"
        if needs.startswith("torch") and not self.facts.get("torch_nccl"):
            return "this torch has no NCCL"
        if needs in ("gpu", "pair") and not self.facts.get("nccl"):
            return f"our NCCL engine does not start: {self.facts.get('nccl_error', 'unknown')}"
        if needs == "torch-pair" and len(gpus) < 2:
            return "torch's NCCL takes one rank a GPU, and there is one GPU"
        if needs == "pair" and len(gpus) < 2 and self.facts["nccl"] < 23000:
            number = self.facts["nccl"]
            return (
                f"one GPU, and NCCL {number // 10000}.{number // 100 % 100} takes one rank a GPU (2.30 takes several)"
            )
        return ""

    def check(self, name: str, ranks: int, needs: str, seconds: float) -> None:
        left = BUDGET_SECONDS - (time.monotonic() - self.began)
        why = self.missing(needs) or ("the five minutes are over" if left < 10 else "")
        result = {
            "name": name,
            "ranks": ranks,
            "needs": needs,
            "outcome": NOT_RUN,
            "why": why,
            "seconds": 0.0,
            "rows": [],
        }
        if not why:
            began = time.monotonic()
            codes, outputs, late = self.run_ranks(name, ranks, min(seconds, left))
            result["seconds"] = round(time.monotonic() - began, 1)
            expected = [0] * ranks if name != "dead_rank" else [0, -signal.SIGKILL]
            result["outcome"] = PASSED if codes == expected and not late else FAILED
            lines = [line for output in outputs for line in output.splitlines()]
            result["rows"] = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
            if result["outcome"] == FAILED:
                result["why"] = f"not done after {seconds:.0f} s" if late else f"exit statuses {codes}"
                result["output"] = [output[-3000:] for output in outputs]
        self.results.append(result)
        print(f"  {result['outcome']:8s} {name:26s} {result['seconds']:6.1f} s  {result['why']}", flush=True)

    def probe(self) -> bool:
        codes, outputs, late = self.run_ranks("probe", 1, 90)
        for line in outputs[0].splitlines():
            if line.startswith("ROW "):
                self.facts = json.loads(line[4:])
        if codes != [0] or late:
            print(f"this Python cannot run the checks:\n{outputs[0][-3000:]}")
        return codes == [0] and not late

    def verdict(self) -> tuple[int, str]:
        counts = {kind: sum(r["outcome"] == kind for r in self.results) for kind in (PASSED, FAILED, NOT_RUN)}
        tail = f"{counts[PASSED]} passed, {counts[FAILED]} failed, {counts[NOT_RUN]} not run"
        waiting = sum(bool(needs) for _, _, needs, _ in CHECKS)
        if not self.facts.get("gpus"):
            words = f"no GPU: {waiting} tests not run. This says nothing about GPUs. ({tail})"
            return (1 if counts[FAILED] else 3), words
        on_gpu = [r for r in self.results if r["needs"] and r["outcome"] != NOT_RUN]
        if not on_gpu:
            return (1 if counts[FAILED] else 3), f"a GPU is there, but none of the {waiting} tests for it ran. ({tail})"
        return (1 if counts[FAILED] else 0), tail


def report(runner: Runner, code: int, words: str) -> str:
    lines = [f"Evenstep on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M:%S')}", ""]
    lines += [f"{key}: {value}" for key, value in runner.facts.items()]
    lines += ["", f"{'check':28s}{'ranks':>6s}  outcome   seconds"]
    for result in runner.results:
        lines.append(
            f"{result['name']:28s}{result['ranks']:6d}  {result['outcome']:8s} {result['seconds']:8.1f}  {result['why']}"
        )
    rows = [(result["name"], row) for result in runner.results for row in result["rows"]]
    if rows:
        lines += ["", "measured (medians)"]
        lines += [f"{name:24s}" + "  ".join(f"{key}={value}" for key, value in row.items()) for name, row in rows]
    for result in runner.results:
        for rank, output in enumerate(result.get("output", [])):
            lines += ["", f"--- {result['name']}, rank {rank} ---", output]
    lines += ["", words, f"exit status {code}", ""]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "report", help="folder for the report and the logs")
    parser.add_argument("--only", default="", help="checks whose name has this in it")
    options = parser.parse_args()
    wheels = sorted(HERE.glob("evenstep-*.whl"))
    if not wheels:
        print(f"no wheel beside {__file__}: make the folder with `make gpu-check`")
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    unpack(wheels[-1], HERE / "site")
    runner = Runner(HERE / "site", options.out)
    if not runner.probe():
        return 2
    print(f"{wheels[-1].name}, torch {runner.facts['torch']}, GPUs: {runner.facts['gpus'] or 'none'}", flush=True)
    for name, ranks, needs, seconds in CHECKS:
        if options.only in name:
            runner.check(name, ranks, needs, seconds)
    code, words = runner.verdict()
    (options.out / "report.json").write_text(
        json.dumps({"exit": code, "verdict": words, "facts": runner.facts, "checks": runner.results}, indent=1)
    )
    (options.out / "report.txt").write_text(report(runner, code, words))
    print(f"{words}\nreport: {options.out / 'report.txt'}")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
