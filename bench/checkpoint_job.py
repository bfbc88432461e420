"""What checkpoints in the background cost a job whose ten steps are not much longer than writing one takes.

    python bench/checkpoint_job.py [--megabytes 150] [--batch 64] [--turns 15] [--rounds 4] [--folder DIR] [--json FILE]

`evenstep run -n 2 --checkpoint-every 10`, as a user starts it; each rank has a core, and nothing is left for the writer. Of thirty
steps ten follow a checkpoint and twenty do not, by turns in one job, since jobs differ among one another by more than checkpoints
cost (where their memory lies), and a shared machine's speed within seconds. `slowed` compares the ten steps of each turn that follow
its checkpoint with the mean of the ten before and the ten after (the median over all turns, and each job's): the checkpoint must be
written within its ten, which is looked at. `stall` is how long rank 0 is kept from its next step at a checkpoint, beside one copy of
the state in memory in the same process. Steps should take 100 to 300 ms: --batch says how long.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from heading import add_program, found_program, heading, print_heading

WIDTH, EVERY, WARM = 1024, 10, 20
TENS = 3  # of steps of a turn, of which the first follows a checkpoint
AIMS = {"slowed": 0.03, "stall": 1.2}


def train(megabytes: float, batch: int, turns: int) -> None:
    """One rank of the job."""
    import torch

    import evenstep as es

    checkpoint = importlib.import_module("evenstep.checkpoint")  # es.checkpoint is the function

    torch.manual_seed(0)
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * (WIDTH * WIDTH + WIDTH))))
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    data = torch.utils.data.TensorDataset(torch.randn(2 * batch, WIDTH))
    model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2 * batch))
    stalls: list[float] = []
    late = 0
    automatic = checkpoint.automatic
    folder = pathlib.Path(os.environ["EVENSTEP_RUN_DIR"], "checkpoints")

    def timed(session: Any) -> None:
        nonlocal late
        turn, after = divmod(session.step - WARM, TENS * EVERY)
        if after == EVERY and turn >= 0 and es.is_main():
            late += not any(folder.glob(f"step-*{session.step - EVERY}"))
        if after != 0 or turn < 0:
            return
        began = time.perf_counter()
        automatic(session)
        stalls.append(time.perf_counter() - began)

    checkpoint.automatic = timed  # type: ignore[attr-defined]
    ends: list[float] = []
    steps = turns * TENS * EVERY
    for _ in es.epochs(WARM + steps + 1):  # the last one's end is the next one's begin
        for (inputs,) in loader:
            ends.append(time.perf_counter())
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    if not es.is_main():
        return
    tens = [(ends[at + EVERY] - ends[at]) / EVERY for at in range(WARM, WARM + steps, EVERY)]
    tensors = [*model.state_dict().values()]
    tensors += [each for state in optimizer.state_dict()["state"].values() for each in state.values()]
    kept, copies = [each.clone() for each in tensors], []
    for _ in range(9):
        began = time.perf_counter()
        for to, tensor in zip(kept, tensors):
            to.copy_(tensor)
        copies.append(time.perf_counter() - began)
    found: dict[str, Any] = {"tens": tens, "late": late, "stall": stalls, "copy": copies[2:]}
    found["bytes"] = sum(t.nbytes for t in kept)
    pathlib.Path(os.environ["EVENSTEP_RUN_DIR"], "figures.json").write_text(json.dumps(found))


def run_job(options: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    name = "job"
    command = [options.program, "run", "-n", "2", "--runs-dir", str(folder), "--name", name, "--quiet"]
    command += ["--log-rank", "none", "--policy", "equal", "--checkpoint-every", str(EVERY), "--python", sys.executable]
    command += [__file__, "--train", "--megabytes", str(options.megabytes)]
    command += ["--batch", str(options.batch), "--turns", str(options.turns)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the job ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads((folder / name / "figures.json").read_text())
    return found


def without(tens: list[float]) -> list[float]:
    return [each for at, each in enumerate(tens) if at % TENS != 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=150, help="of the whole state (default 150)")
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank's step (default 64)")
    parser.add_argument("--turns", type=int, default=15, help="of 30 steps, in a job (default 15)")
    parser.add_argument("--rounds", type=int, default=4, help="jobs (default 4)")
    parser.add_argument("--folder", default="build", help="on the disk to write to (default build)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    add_program(parser)
    options = parser.parse_args()
    if options.train:
        train(options.megabytes, options.batch, options.turns)
        return
    options.program = found_program(options)
    pathlib.Path(options.folder).mkdir(parents=True, exist_ok=True)
    print_heading("Checkpoints in the background of a job of two ranks")
    jobs: list[dict[str, Any]] = []
    slower: list[float] = []  # one a turn
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="evenstep-bench-", dir=options.folder) as text:
            one = run_job(options, pathlib.Path(text))
        jobs.append(one)
        tens = one["tens"]
        own = [2 * tens[at] / (tens[at - 1] + tens[at + 1]) - 1 for at in range(TENS, len(tens), TENS)]
        slower += own
        step = statistics.median(without(tens))
        print(f"  {1e3 * step:6.1f} ms a step; with checkpoints {' '.join(f'{100 * each:+5.1f}' for each in own)} %", flush=True)  # fmt: skip
        if one["late"]:
            print(f"  (of {one['late']} turns the checkpoint was not written within its ten steps: --batch)")
    slowed = statistics.median(slower)
    copy = statistics.median(each for one in jobs for each in one["copy"])
    stall = statistics.median(each for one in jobs for each in one["stall"])
    longest = max(each for one in jobs for each in one["stall"])
    plain = statistics.median(each for one in jobs for each in without(one["tens"]))
    size = jobs[0]["bytes"]
    print(
        f"\n{size / 1e6:.0f} MB every {EVERY} steps of {1e3 * plain:.0f} ms: {size / (EVERY * plain) / 1e6:.0f} MB a second"
    )
    if not 0.1 <= plain <= 0.3:
        print("  (not a step of 100 to 300 ms: --batch)")
    print(f"{'':8}{'achieved':>10}{'aim':>8}{'achieved / aim':>16}")
    print(f"{'slowed':8}{100 * slowed:9.1f}%{100 * AIMS['slowed']:7.0f}%{slowed / AIMS['slowed']:16.2f}")
    print(f"{'stall':8}{stall / copy:10.2f}{AIMS['stall']:8.1f}{stall / copy / AIMS['stall']:16.2f}")
    print(f"  stall {1e3 * stall:.1f} ms ({1e3 * longest:.1f} at most), a copy in memory {1e3 * copy:.1f} ms")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps({"heading": heading(), "jobs": jobs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
