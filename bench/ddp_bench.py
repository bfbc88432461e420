"""DDP training of the demo's model on backend "evenstep" and on Gloo, in alternating rounds of one run, at several sizes.

    python bench/ddp_bench.py [--spare] [--rounds 9] [--widths 64,128,256,512] [--batch 8] [--steps 6] [--bucket-mb 25]
                              [--json FILE]

Two ranks, each pinned to a core of its own, so no core is spare for communication. With --spare, rank 0 alone computes, on
the first core; rank 1 makes the same calls with gradients that it has at once, and it and all threads that communicate have the
second core. `compute` is DDP's step on a group whose ranks meet in each all-reduce, but move four bytes; what a step takes
longer than that is communication in the open (with --spare: what backward takes longer after its last gradient, which
says more where an exchange is a hundredth of a step);
`alone` is an all-reduce of each bucket, by the same threads, while nobody computes. `last` is DDP's last bucket's share
of the gradients: it is full when backward ends, and cannot be hidden. DDP's buckets are of 25 MB, a smaller model's gradients
but for the first megabyte are in one: --bucket-mb makes them smaller, as `bucket_cap_mb` does in a script.

How fast a step is depends on where its model lies in memory, by more than the ways differ: the ranks are started three times,
with a third of the rounds each, and each way's model is made first, second and last once.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from heading import heading
from step_tail import StepWithTail

RANKS = 2
WAYS = ("evenstep", "gloo")
TRAINED = (*WAYS, "compute")
TURNS = len(TRAINED)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spare", action="store_true", help="leave the second core to the threads that communicate")
    parser.add_argument("--rounds", type=int, default=9, help="alternating rounds a size (default 9)")
    parser.add_argument("--widths", default="64,128,256,512", help="of the model, separated by commas")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="of a window of text")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=6, help="of a round, after one that is not measured")
    parser.add_argument("--bucket-mb", type=float, default=25, help="of DDP's buckets (default 25, as DDP's)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def seconds_of(step: Callable[[], None], count: int, meet: Callable[[], Any]) -> float:
    step()
    meet()
    began = time.perf_counter()
    for _ in range(count):
        step()
    meet()
    return (time.perf_counter() - began) / count


def run_rank(options: argparse.Namespace) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[1 if options.spare else options.rank % len(cores)]})  # of all threads from here on
    computes = not options.spare or options.rank == 0
    import torch
    import torch.distributed as dist

    import evenstep  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    dist.init_process_group("evenstep", rank=options.rank, world_size=RANKS)
    groups = {"evenstep": dist.group.WORLD, "gloo": dist.new_group(backend="gloo"), "compute": light_group()}
    for group in groups.values():
        dist.all_reduce(torch.zeros(1), group=group, async_op=True).wait()  # its threads are there now
    if options.spare and computes:
        os.sched_setaffinity(0, {cores[0]})  # of this thread alone
    rows = [measure(options, int(width), groups, computes) for width in options.widths.split(",")]
    if options.rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def light_group() -> Any:
    """A group on backend "evenstep" whose all-reduce meets the others, but moves four bytes only, and notes in `asked` of how
    many elements it was."""
    import torch.distributed as dist

    group: Any = dist.new_group(backend="evenstep")
    whole = type(group)

    def allreduce(self: Any, tensors: Any, opts: Any = None) -> Any:
        self.asked += [tensor.numel() for tensor in tensors]
        return whole.allreduce(self, [tensor.view(-1)[:1] for tensor in tensors], opts)

    group.__class__ = type("Light", (whole,), {"allreduce": allreduce})
    group.asked = []
    return group


class Step(StepWithTail):
    """A step of DDP training on one group, and the seconds from its last gradient to backward's end."""

    def __init__(self, options: argparse.Namespace, width: int, group: Any) -> None:
        import torch
        from char_gpt import GPT
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(1)
        self.model = DistributedDataParallel(
            GPT(options.layers, width, 4, options.length), process_group=group, bucket_cap_mb=options.bucket_mb
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.tokens = torch.randint(0, 256, (options.batch, options.length))
        self.bytes = sum(4 * parameter.numel() for parameter in self.model.parameters())
        self.watch(self.model.parameters())


def exchange(group: Any, tensors: list[Any]) -> None:
    """What DDP calls in a step, with gradients that are there."""
    import torch.distributed as dist

    for work in [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]:
        work.wait()


def measure(options: argparse.Namespace, width: int, groups: dict[str, Any], computes: bool) -> dict[str, Any]:
    """All seconds of each way at one width, in this turn. computes: this rank trains, else it makes the calls alone."""
    import torch
    import torch.distributed as dist

    order = TRAINED[options.turn :] + TRAINED[: options.turn]
    trained = {way: Step(options, width, groups[way]) for way in order}
    for _ in range(3):  # DDP puts its buckets into the order of the first backward
        groups["compute"].asked.clear()
        for step in trained.values():
            step()
    tensors = [torch.zeros(elements) for elements in groups["compute"].asked]
    steps: dict[str, Callable[[], None]] = dict(trained)
    if not computes:
        steps = {way: functools.partial(exchange, groups[way], tensors) for way in trained}
    for way in WAYS:
        steps[f"{way} alone"] = functools.partial(exchange, groups[way], tensors)
    times: dict[str, list[float]] = {way: [] for way in steps}
    for step in trained.values():
        step.tails.clear()
    for _ in range(-(-options.rounds // TURNS)):
        for way, call in steps.items():
            times[way].append(seconds_of(call, options.steps, dist.barrier))
    last = tensors[-1].numel() / sum(tensor.numel() for tensor in tensors)
    tails = {way: step.tails for way, step in trained.items()}
    return {"width": width, "bytes": trained["compute"].bytes, "last": last, "times": times, "tails": tails}


def summary(options: argparse.Namespace, turns: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of one width: medians over the rounds of all turns."""
    rounds = {way: [took for turn in turns for took in turn["times"][way]] for way in turns[0]["times"]}
    found = {way: statistics.median(took) for way, took in rounds.items()}
    tails = {way: statistics.median(tail for turn in turns for tail in turn["tails"][way]) for way in TRAINED}
    for way in WAYS:
        longer = tails[way] - tails["compute"] if options.spare else found[way] - found["compute"]
        found[f"{way} open"] = max(0.0, longer)
    return {**{key: turns[0][key] for key in ("width", "bytes", "last")}, **found, "rounds": rounds}


def show(options: argparse.Namespace, report: dict[str, Any]) -> None:
    for name in ("date", "hardware", "software", "command"):
        print(f"{name:9} {report[name]}")
    where = "one computes, a core is spare for communication" if options.spare else "one core each"
    print(f"\nDDP, {RANKS} ranks, {where}, {options.batch} samples of {options.length} a rank; medians")
    print(
        f"{'width':>6} {'gradients':>10} {'compute':>9} {'evenstep':>9} {'Gloo':>9} {'faster':>7} "
        f"{'in the open':>16} {'alone':>16} {'hidden':>13} {'last':>5}"
    )
    for row in report["rows"]:
        ways = [(row[way], row[f"{way} open"], row[f"{way} alone"]) for way in WAYS]
        opened = "/".join(f"{1e3 * each[1]:.1f}" for each in ways)
        alone = "/".join(f"{1e3 * each[2]:.1f}" for each in ways)
        hidden = "/".join(f"{max(0.0, 1 - each[1] / each[2]):.0%}" for each in ways)
        print(
            f"{row['width']:>6} {row['bytes'] / 1e6:>7.1f} MB {1e3 * row['compute']:>6.1f} ms {1e3 * ways[0][0]:>6.1f} ms "
            f"{1e3 * ways[1][0]:>6.1f} ms {ways[1][0] / ways[0][0]:>6.2f}x {opened:>13} ms {alone:>13} ms {hidden:>13} {row['last']:>5.0%}"
        )
    print("\nPairs are evenstep/Gloo.")


def run_turn(turn: int) -> list[dict[str, Any]]:
    """What rank 0 measured, a row for each width, with all ranks started anew."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, __file__, *sys.argv[1:], "--port", str(port), "--turn", str(turn)]
    ranks = [
        subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE if rank == 0 else None, text=True)
        for rank in range(RANKS)
    ]
    try:
        output, _ = ranks[0].communicate(timeout=1200)
        if any(rank.wait(timeout=60) for rank in ranks):
            sys.exit("a rank failed")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    rows: list[dict[str, Any]] = json.loads(output)
    return rows


def main() -> None:
    options = arguments()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
    if options.rank is not None:
        run_rank(options)
        return
    report: dict[str, Any] = heading()
    turns = [run_turn(turn) for turn in range(TURNS)]
    report["rows"] = [summary(options, list(rows)) for rows in zip(*turns)]
    show(options, report)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
