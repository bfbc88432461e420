"""DDP training of the demo's model on backend "evenstep" and on Gloo, in alternating rounds of one run, at several sizes.

    python bench/ddp_bench.py [--spare] [--rounds 9] [--widths 64,128,256,512] [--batch 8] [--steps 6] [--bucket-mb 25]
                              [--json FILE]

Two ranks, each pinned to a core of its own, so no core is spare for communication. With --spare, both ranks compute on
the first core, and the threads that communicate have the second to themselves. `compute` is DDP's step on a group whose
ranks meet in each all-reduce, but move four bytes; what a step takes longer than that is communication in the open;
`alone` is one all-reduce of as many bytes, by the same threads, while nobody computes. `last` is DDP's last bucket's share
of the gradients: it is full when backward ends, and cannot be hidden. DDP's buckets are of 25 MB, a smaller model's gradients
but for the first megabyte are in one: --bucket-mb makes them smaller, as `bucket_cap_mb` does in a script.
"""

from __future__ import annotations

import argparse
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

RANKS = 2
WAYS = ("evenstep", "gloo")


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
    import torch
    import torch.distributed as dist

    import evenstep  # noqa: F401  (registers the backend)

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    dist.init_process_group("evenstep", rank=options.rank, world_size=RANKS)
    groups = {"evenstep": dist.group.WORLD, "gloo": dist.new_group(backend="gloo"), "compute": light_group()}
    for group in groups.values():
        dist.all_reduce(torch.zeros(1), group=group, async_op=True).wait()  # its threads are there now
    if options.spare:
        os.sched_setaffinity(0, {cores[0]})  # of this thread alone
    rows = [measure(options, int(width), groups) for width in options.widths.split(",")]
    if options.rank == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def light_group() -> Any:
    """A group on backend "evenstep" whose all-reduce meets the others, but moves four bytes only."""
    import torch.distributed as dist

    group = dist.new_group(backend="evenstep")
    whole = type(group)

    def allreduce(self: Any, tensors: Any, opts: Any = None) -> Any:
        return whole.allreduce(self, [tensor.view(-1)[:1] for tensor in tensors], opts)

    group.__class__ = type("Light", (whole,), {"allreduce": allreduce})
    return group


def measure(options: argparse.Namespace, width: int, groups: dict[str, Any]) -> dict[str, Any]:
    """Median seconds of each way at one width."""
    import torch
    import torch.distributed as dist
    from char_gpt import GPT
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    tokens = torch.randint(0, 256, (options.batch, options.length))
    steps: dict[str, Callable[[], None]] = {}
    models: list[Any] = []
    size = 0
    for way in (*WAYS, "compute"):
        torch.manual_seed(1)
        model = DistributedDataParallel(
            GPT(options.layers, width, 4, options.length),
            process_group=groups[way],
            bucket_cap_mb=options.bucket_mb,  # type: ignore[arg-type]  # any number
        )
        models.append(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        size = sum(parameter.numel() for parameter in model.parameters())

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        steps[way] = step
    bytes_ = torch.zeros(size)
    for way in WAYS:
        steps[f"{way} alone"] = lambda group=groups[way]: dist.all_reduce(bytes_, group=group, async_op=True).wait()
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(options.rounds):
        for way, call in steps.items():
            times[way].append(seconds_of(call, options.steps, dist.barrier))
    medians = {way: statistics.median(took) for way, took in times.items()}
    return {"width": width, "bytes": 4 * size, "last": last_bucket(models[0]) / (4 * size), **medians}


def last_bucket(model: Any) -> int:
    """Bytes of the bucket that is full last, once DDP has put its buckets into the order of the first backward."""
    facts = model._get_ddp_logging_data()
    sizes = facts.get("rebuilt_bucket_sizes") or facts["bucket_sizes"]
    return int(sizes.split(",")[-1])


def show(options: argparse.Namespace, report: dict[str, Any]) -> None:
    for name in ("date", "hardware", "software", "command"):
        print(f"{name:9} {report[name]}")
    where = "both on one core, another for communication" if options.spare else "one core each"
    print(f"\nDDP, {RANKS} ranks, {where}, {options.batch} samples of {options.length} a rank; medians")
    print(
        f"{'width':>6} {'gradients':>10} {'compute':>9} {'evenstep':>9} {'Gloo':>9} {'faster':>7} "
        f"{'in the open':>16} {'alone':>16} {'hidden':>13} {'last':>5}"
    )
    for row in report["rows"]:
        ways = [(row[way], max(0.0, row[way] - row["compute"]), row[f"{way} alone"]) for way in WAYS]
        opened = "/".join(f"{1e3 * each[1]:.1f}" for each in ways)
        alone = "/".join(f"{1e3 * each[2]:.1f}" for each in ways)
        hidden = "/".join(f"{max(0.0, 1 - each[1] / each[2]):.0%}" for each in ways)
        print(
            f"{row['width']:>6} {row['bytes'] / 1e6:>7.1f} MB {1e3 * row['compute']:>6.1f} ms {1e3 * ways[0][0]:>6.1f} ms "
            f"{1e3 * ways[1][0]:>6.1f} ms {ways[1][0] / ways[0][0]:>6.2f}x {opened:>13} ms {alone:>13} ms {hidden:>13} {row['last']:>5.0%}"
        )
    print("\nPairs are evenstep/Gloo.")


def main() -> None:
    options = arguments()
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
    if options.rank is not None:
        run_rank(options)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    report: dict[str, Any] = heading()
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--port", str(port)],
            stdout=subprocess.PIPE if rank == 0 else None,
            text=True,
        )
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
    report["rows"] = json.loads(output)
    show(options, report)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
