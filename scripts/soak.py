"""Trains the example again and again while its ranks or its agent are killed, and checks after each time that nothing is lost
or left: the parameters equal an undisturbed run's, no process and no cgroup of the job remains.

python scripts/soak.py [--minutes 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time

import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = pathlib.Path(sys.executable).parent / "evenstep"
MARK = "EVENSTEP_SOAK_MARK"
MODEL = [
    "--steps",
    "60",
    "--batch",
    "12",
    "--layers",
    "1",
    "--width",
    "32",
    "--text-bytes",
    "200000",
    "--dtype",
    "float64",
]


def processes(mark: str) -> dict[int, dict[str, str]]:
    """The processes that carry the mark, with their environments."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                lines = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"{MARK}={mark}".encode() in lines:
                pairs = (line.decode(errors="replace").partition("=") for line in lines if line)
                found[int(entry.name)] = {name: value for name, _, value in pairs}
    return found


def wait_for_text(path: pathlib.Path, wanted: str, job: subprocess.Popen[bytes], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and job.poll() is None:
        if path.exists() and wanted in path.read_text(errors="replace"):
            return True
        time.sleep(0.05)
    return False


def start(folder: pathlib.Path, ranks: int, mark: str, *options: str) -> subprocess.Popen[bytes]:
    command = [
        PROGRAM,
        "run",
        "-n",
        str(ranks),
        "--runs-dir",
        folder,
        "--name",
        "soak",
        "--checkpoint-every",
        "5",
        *options,
    ]
    command += [ROOT / "examples" / "char_gpt.py", *MODEL, "--save", folder / "final.pt"]
    with (folder / "output.txt").open("ab") as output:
        return subprocess.Popen(
            command, cwd=folder, env=os.environ | {MARK: mark}, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        )


def nothing_left(mark: str) -> None:
    deadline = time.monotonic() + 10
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes(mark)
    if left:
        raise SystemExit(f"left behind: {sorted(left)}")
    groups = [str(path) for path in pathlib.Path("/sys/fs/cgroup").glob("**/evenstep*") if path.is_dir()]
    if groups:
        raise SystemExit(f"cgroups left behind: {groups}")


def difference(a: pathlib.Path, b: pathlib.Path) -> float:
    one, two = torch.load(a, weights_only=True), torch.load(b, weights_only=True)
    apart = sum(float((one[name] - two[name]).pow(2).sum()) for name in one)
    size = sum(float(one[name].pow(2).sum()) for name in one)
    return (apart / size) ** 0.5


def disturbed(folder: pathlib.Path, dice: random.Random) -> str:
    """One job that is hurt once; resumed by hand where its agent was the victim. Returns what was done."""
    ranks = dice.choice([2, 3])
    mark = secrets.token_hex(8)
    quota = ["--cpu-quota", "1:0.5"] if dice.random() < 0.5 else []
    job = start(folder, ranks, mark, *quota)
    moment = dice.choice([10, 20, 30, 40, 50])
    reached = wait_for_text(folder / "output.txt", f"step    {moment:2d}", job, 300)
    victim = dice.choice(["rank", "agent"])
    words = f"{ranks} ranks{' with a quota' if quota else ''}, {victim} killed after step {moment}"
    if not reached:
        job.kill()
        raise SystemExit(f"{words}: step {moment} was never reached\n{(folder / 'output.txt').read_text()[-3000:]}")
    if victim == "agent":
        job.kill()
        job.wait()
        nothing_left(mark)
        job = start(folder, ranks, mark, "--resume", "auto", *quota)
    else:
        chosen = str(dice.randrange(ranks))
        for pid, environment in processes(mark).items():
            if environment.get("RANK") == chosen:
                os.kill(pid, signal.SIGKILL)
    code = job.wait(timeout=600)
    if code != 0:
        raise SystemExit(f"{words}: the job ended with {code}\n{(folder / 'output.txt').read_text()[-3000:]}")
    nothing_left(mark)
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    deadline = time.monotonic() + 60 * args.minutes
    passed = 0
    with tempfile.TemporaryDirectory(prefix="evenstep-soak-") as text:
        base = pathlib.Path(text)
        reference = base / "reference"
        reference.mkdir()
        if start(reference, 2, "reference").wait(timeout=600) != 0:
            raise SystemExit(f"the undisturbed run failed\n{(reference / 'output.txt').read_text()[-3000:]}")
        while passed == 0 or time.monotonic() < deadline:
            folder = base / f"job-{passed}"
            folder.mkdir()
            words = disturbed(folder, dice)
            apart = difference(reference / "final.pt", folder / "final.pt")
            if not apart <= 1e-10:
                raise SystemExit(f"{words}: the parameters differ by {apart:.3g} (relative norm)")
            passed += 1
            print(f"{passed:4d}  {words}: parameters differ by {apart:.1e}", flush=True)
    print(f"{passed} passed, 0 failed")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
