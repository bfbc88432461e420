"""One rank of the training benchmark: the same model and loop in five ways.

    ddp       PyTorch DDP over Gloo, the equal split
    hand      PyTorch DDP over Gloo, a fixed unequal split (--split), each loss weighted by hand
    evenstep  es.prepare; the shares are Evenstep's affair
    speeds    no communication: what each rank does alone while the other runs too, at several batch sizes
    plain     one process

Rank 0 prints one line "RESULT {json}". Started by train_bench.py, for all modes by the same launcher with the same
pinning and quotas.
"""

import argparse
import json
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, Subset
from torch.utils.data.distributed import DistributedSampler

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
from char_gpt import GPT, Windows, standard_library_text


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=["ddp", "hand", "evenstep", "speeds", "plain"], required=True)
    parser.add_argument("--split", help="hand: samples of each rank, e.g. 26,6")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=2.0, help="speeds: how long each batch size runs")
    parser.add_argument("--sizes", help="speeds: batch sizes of each rank, e.g. '16,24,30/2,4,8'")
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


def timed(args, batches, step) -> float:
    """Samples per second of all ranks over the steps after the warm-up."""
    began = 0.0
    for index, (tokens, targets) in enumerate(batches):
        if index == args.warmup:
            if dist.is_initialized():
                dist.barrier()
            began = time.perf_counter()
        step(tokens, targets)
    if dist.is_initialized():
        dist.barrier()
    return args.steps * args.batch / (time.perf_counter() - began)


def run_ddp(args: argparse.Namespace, rank: int, world: int) -> dict:
    dist.init_process_group("gloo")
    model, optimizer, dataset = build(args)
    split = [int(part) for part in args.split.split(",")] if args.split else [args.batch // world] * world
    steps = args.steps + args.warmup
    mine = Subset(dataset, range(steps * split[rank] * world))
    sampler = DistributedSampler(mine, num_replicas=world, rank=rank)
    loader = DataLoader(mine, batch_size=split[rank], sampler=sampler, drop_last=True)
    model = DistributedDataParallel(model)
    weight = split[rank] * world / args.batch  # DDP divides by the world size
    rate = timed(args, loader, lambda x, y: train_step(model, optimizer, x, y, weight))
    dist.destroy_process_group()
    return {"samples_per_second": rate, "split": split}


def run_evenstep(args: argparse.Namespace) -> dict:
    import evenstep as es

    model, optimizer, dataset = build(args)
    sampler = RandomSampler(dataset, num_samples=(args.steps + args.warmup) * args.batch)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    sizes: list[int] = []

    def step(tokens, targets) -> None:
        sizes.append(len(tokens))
        train_step(model, optimizer, tokens, targets)

    rate = timed(args, loader, step)
    return {"samples_per_second": rate, "rank0_shares": sizes}


def run_plain(args: argparse.Namespace) -> dict:
    model, optimizer, dataset = build(args)
    sampler = RandomSampler(dataset, num_samples=(args.steps + args.warmup) * args.batch)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)
    return {"samples_per_second": timed(args, loader, lambda x, y: train_step(model, optimizer, x, y))}


def run_speeds(args: argparse.Namespace, rank: int) -> dict | None:
    """Mean seconds a step at each of this rank's batch sizes, all ranks at work the whole time."""
    dist.init_process_group("gloo")
    model, optimizer, dataset = build(args)
    sizes = [int(size) for size in args.sizes.split("/")[rank].split(",")]
    seconds = []
    for size in sizes:
        loader = DataLoader(dataset, batch_size=size, shuffle=True)
        batches = iter(loader)
        for _ in range(2):
            train_step(model, optimizer, *next(batches))
        dist.barrier()
        began = time.perf_counter()
        count = 0
        while time.perf_counter() - began < args.seconds or count < 3:
            train_step(model, optimizer, *next(batches))
            count += 1
        seconds.append((time.perf_counter() - began) / count)
    tables: list = [None] * dist.get_world_size()
    dist.all_gather_object(tables, {"samples": sizes, "seconds": seconds})
    dist.destroy_process_group()
    return {"tables": tables}


def main() -> None:
    args = arguments()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    if args.mode in ("ddp", "hand"):
        result = run_ddp(args, rank, world)
    elif args.mode == "evenstep":
        result = run_evenstep(args)
    elif args.mode == "plain":
        result = run_plain(args)
    else:
        result = run_speeds(args, rank)
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
