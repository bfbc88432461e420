"""Training steps with es.prepare(engine="torch") over Gloo: buckets that leave during backward, against such as leave when it has
ended.

    python bench/torch_engine_bench.py [--rounds 9] [--widths 64,256] [--batch 8] [--steps 6] [--compression none]
                                       [--against FOLDER] [--json FILE]

Two ranks, each pinned to a core of its own with all its threads, so no core is spare for communication. `after` is the same code,
told to hand its buckets on (of 25 MiB) when backward has ended; with --against it is the package in FOLDER (the python/ of another
tree, built), as it is. The two ways are jobs of their own, of which one is at work at a time, in turns; the order changes from
round to round. A step's time is the median over rounds of a round's mean; `tail` is from the last gradient to the end of backward.
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
from typing import Any

from heading import heading
from step_tail import StepWithTail

RANKS = 2
WAYS = ("after", "during")
TREE = pathlib.Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="of each way (default 9)")
    parser.add_argument("--widths", default="64,256", help="of the model, separated by commas")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="of a window of text")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=6, help="of a round, after one that is not measured")
    parser.add_argument("--compression", default="none", help="none, fp16 or bf16")
    parser.add_argument("--against", metavar="FOLDER", help="another package, which `after` is then")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_rank(options: argparse.Namespace) -> None:
    """Makes a round for each line on its standard input, and tells what it took."""
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})  # of all threads from here on
    import torch

    import evenstep as es

    torch.set_num_threads(1)
    for width in map(int, options.widths.split(",")):
        step = Step(options, width)
        for _ in range(3):  # the first one learns the order of gradients
            step()
        while (line := sys.stdin.readline().strip()) == "round":
            step()
            es.barrier()
            step.tails.clear()
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(options.steps):
                step()
            worked = (time.process_time() - worked) / options.steps
            es.barrier()
            took = (time.perf_counter() - began) / options.steps
            if rank == 0:
                print(json.dumps([took, statistics.median(step.tails), worked, step.bytes]), flush=True)
        assert line == "next", line


class Step(StepWithTail):
    """A training step of one way, and the seconds from its last gradient to backward's end."""

    def __init__(self, options: argparse.Namespace, width: int) -> None:
        import torch
        from char_gpt import GPT

        import evenstep as es

        torch.manual_seed(1)
        model = GPT(options.layers, width, 4, options.length)
        late = options.way == "after" and options.against is None
        self.model, self.optimizer = es.prepare(
            model,
            torch.optim.AdamW(model.parameters(), lr=1e-3),
            engine="torch",
            compression=options.compression,
            bucket_cap_mb=25 if late else None,
        )
        if late:
            waits_for_the_end(es.session().steps.syncs[-1].engine)
        self.tokens = torch.randint(0, 256, (options.batch, options.length))
        self.bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.watch(self.model.parameters())


def waits_for_the_end(engine: Any) -> None:
    """Its buckets are packed as they are, and handed on when backward has ended."""
    hand_on = engine._hand_on_complete
    engine._hand_on_complete = lambda closing=False: hand_on(closing) if closing else None


class Job:
    """The ranks of one way."""

    def __init__(self, way: str, options: argparse.Namespace) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
        }
        other = [options.against] if way == "after" and options.against else []
        given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        paths = os.pathsep.join([*other, *given, str(TREE / "examples")])
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--way", way],
                env={**os.environ, **shared, "PYTHONPATH": paths, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if rank == 0 else None,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def tell(self, word: str) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(word + "\n")
            rank.stdin.flush()

    def round(self) -> list[float]:
        self.tell("round")
        assert self._ranks[0].stdout is not None
        line = self._ranks[0].stdout.readline()
        if not line:
            sys.exit("a rank failed")
        return list(json.loads(line))

    def end(self) -> bool:
        """Whether all ended well."""
        try:
            return not any(rank.wait(timeout=60) for rank in self._ranks)
        finally:
            for rank in self._ranks:
                if rank.poll() is None:
                    rank.kill()
                    rank.wait()


def measure(jobs: dict[str, Job], rounds: int) -> dict[str, Any]:
    """At one width."""
    found: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    load = os.getloadavg()[0]
    for number in range(rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            found[way].append(jobs[way].round())
    row: dict[str, Any] = {"bytes": int(found["during"][0][3]), "load": [load, os.getloadavg()[0]]}
    for way, rows in found.items():
        row[way], row[f"{way} tail"], row[f"{way} cpu"] = (statistics.median(one[k] for one in rows) for k in range(3))
        row[f"{way} range"] = [min(one[0] for one in rows), max(one[0] for one in rows)]
    pairs = [a[0] / b[0] for a, b in zip(found["after"], found["during"])]
    row["pairs"] = sorted(pairs)
    return row


def show(options: argparse.Namespace, report: dict[str, Any]) -> None:
    for name in ("date", "hardware", "software", "command"):
        print(f"{name:9} {report[name]}")
    print(
        f"\nes.prepare(engine='torch', compression={options.compression!r}) over Gloo, {RANKS} ranks, one core each; medians"
    )
    print(
        f"{'width':>6} {'gradients':>10} {'after':>10} {'during':>10} {'faster':>7} {'rounds':>13} {'tails':>16} {'of a core':>16} {'load':>11}"
    )
    for row in report["rows"]:
        pairs = row["pairs"]
        tails = "/".join(f"{1e3 * row[f'{way} tail']:.1f}" for way in WAYS)
        cpu = "/".join(f"{1e3 * row[f'{way} cpu']:.1f}" for way in WAYS)
        load = "-".join(f"{one:.1f}" for one in row["load"])
        print(
            f"{row['width']:>6} {row['bytes'] / 1e6:>7.1f} MB {1e3 * row['after']:>7.1f} ms {1e3 * row['during']:>7.1f} ms "
            f"{statistics.median(pairs):>6.2f}x {pairs[0]:>5.2f} to {pairs[-1]:.2f} {tails:>13} ms {cpu:>13} ms {load:>11}"
        )
    print(
        "\nfaster: the median over rounds of after / during, made one after the other; tails, and what rank 0 took of its core, are after/during."
    )


def main() -> None:
    options = arguments()
    if options.way is not None:
        run_rank(options)
        return
    report: dict[str, Any] = {**heading(), "rows": []}
    jobs = {way: Job(way, options) for way in WAYS}
    well = {}
    try:
        for width in map(int, options.widths.split(",")):
            report["rows"].append({"width": width, **measure(jobs, options.rounds)})
            for job in jobs.values():
                job.tell("next")
    finally:
        well = {way: job.end() for way, job in jobs.items()}
    if not all(well.values()):
        sys.exit("a rank failed")
    show(options, report)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
