"""One rank of the training benchmark: the same model and loop in three ways, a few seconds at a time.

    ddp       PyTorch DDP over Gloo; each order says the split, each loss is weighted by hand where it is unequal
    evenstep  es.prepare; the shares are Evenstep's affair
    speeds    no communication: what each rank does alone while the other runs too, at several batch sizes

Started by train_bench.py, for all modes by the same launcher with the same pinning and quotas; it waits at a gate
(train_gate.py) for each order and answers with what it measured.
"""

import argparse
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler
from train_gate import Gate

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
from char_gpt import GPT, Windows, standard_library_text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "evenstep", "speeds"], required=True)
    parser.add_argument("--gate", required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20, help="of a block, measured")
    parser.add_argument("--warmup", type=int, default=2, help="of a block, before those")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    return parser.parse_args()


def build(args: argparse.Namespace) -> tuple[torch.nn.Module, torch.optim.Optimizer, Windows]:
    torch.manual_seed(1234)
    dataset = Windows(standard_library_text(1_000_000), args.length)
    model = GPT(args.layers, args.width, 4, args.length)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), dataset


def train_step(model, optimizer, tokens, targets, weight=1.0) -> None:
    logits = model(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    (loss * weight if weight != 1.0 else loss).backward()
    optimizer.step()


def seconds_a_step(batches: Iterable, warmup: int, step: Callable[..., None]) -> float:
    """The mean over the steps after the warm-up; the ranks are in step, so each knows it by itself."""
    began = time.perf_counter()
    count = -warmup
    for tokens, targets in batches:
        if count == 0:
            began = time.perf_counter()
        step(tokens, targets)
        count += 1
    return (time.perf_counter() - began) / count


def run_ddp(args: argparse.Namespace, gate: Gate, rank: int, world: int) -> None:
    dist.init_process_group("gloo")
    model, optimizer, dataset = build(args)
    model = DistributedDataParallel(model)
    for order in gate.orders():
        own = order["split"][rank]
        weight = own * world / args.batch  # DDP divides by the world size
        steps = order.get("steps", args.steps)
        sampler = RandomSampler(dataset, num_samples=(steps + args.warmup) * own)
        loader = DataLoader(dataset, batch_size=own, sampler=sampler)
        seconds = seconds_a_step(loader, args.warmup, lambda x, y, w=weight: train_step(model, optimizer, x, y, w))
        gate.answer({"samples_per_second": args.batch / seconds})
    dist.destroy_process_group()


def run_evenstep(args: argparse.Namespace, gate: Gate) -> None:
    import evenstep as es

    model, optimizer, dataset = build(args)
    sampler = RandomSampler(dataset, num_samples=(args.steps + args.warmup) * args.batch)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for _ in gate.orders():
        sizes: list[int] = []

        def step(tokens: torch.Tensor, targets: torch.Tensor, sizes: list[int] = sizes) -> None:
            sizes.append(len(tokens))
            train_step(model, optimizer, tokens, targets)

        seconds = seconds_a_step(loader, args.warmup, step)  # one epoch
        gate.answer({"samples_per_second": args.batch / seconds, "rank0_shares": sizes})


def run_speeds(args: argparse.Namespace, gate: Gate, rank: int) -> None:
    """Mean seconds a step at each of this rank's batch sizes, all ranks at work the whole time."""
    from evenstep.group import TorchGroup, gather_objects

    dist.init_process_group("gloo")
    everyone = TorchGroup(dist.group.WORLD)
    model, optimizer, dataset = build(args)
    for order in gate.orders():
        sizes, seconds = order["sizes"][rank], []
        for size in sizes:
            batches = iter(DataLoader(dataset, batch_size=size, shuffle=True))
            train_step(model, optimizer, *next(batches))
            dist.barrier()
            began = time.perf_counter()
            count = 0
            while time.perf_counter() - began < order["seconds"] or count < 3:
                train_step(model, optimizer, *next(batches))
                count += 1
            seconds.append((time.perf_counter() - began) / count)
        gate.answer({"tables": gather_objects(everyone, {"samples": sizes, "seconds": seconds})})
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    gate = Gate(args.gate)
    if args.mode == "ddp":
        run_ddp(args, gate, rank, world)
    elif args.mode == "evenstep":
        run_evenstep(args, gate)
    else:
        run_speeds(args, gate, rank)


if __name__ == "__main__":
    main()
