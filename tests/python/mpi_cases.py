"""Run under mpirun by test_mpi.py: every face of the package, in a process that only mpirun has told its place."""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist

import evenstep as es


def place() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def faces(engine: str) -> None:
    rank, ranks = place()
    total = ranks * (ranks + 1) / 2
    with es.comm.open() as group:
        for elements in (3, 5000, 400_000):
            array = np.full(elements, rank + 1, np.float32)
            group.all_reduce(array)
            assert (array == total).all(), array
        assert group._comm.engine == engine, group._comm.engine
    dist.init_process_group("evenstep")
    tensor = torch.full((7,), rank + 1.0)
    dist.all_reduce(tensor)
    assert (tensor == total).all()
    if rank == 0:
        dist.send(torch.arange(100_000.0), 1)
    elif rank == 1:
        got = torch.empty(100_000)
        dist.recv(got, 0)
        assert (got == torch.arange(100_000.0)).all()
    half = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(tensor, group=half)
        assert (tensor == 2 * total).all()
    dist.barrier()
    dist.destroy_process_group()


def train() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.arange(64.0).reshape(16, 4) / 64
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8)
    model, optimizer, loader = es.prepare(model, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    es.print(f"trained on {es.world_size()}: {[round(float(w), 5) for w in weights]}")


def beside_mpi4py(engine: str) -> None:
    from mpi4py import MPI  # starts MPI, and ends it

    faces(engine)
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def one_fails() -> None:
    """Rank 1 leaves; the others have an error that says so, unless mpirun is quicker."""
    rank, _ = place()
    with es.comm.open(timeout=60.0) as group:
        group.barrier()
        if rank == 1:
            raise SystemExit("rank 1 has had enough")
        group.all_reduce(np.ones(4, np.float32))


if __name__ == "__main__":
    case, *arguments = sys.argv[1:]
    {"faces": faces, "train": train, "beside_mpi4py": beside_mpi4py, "one_fails": one_fails}[case](*arguments)
    if "mpi4py" not in case:
        sys.stdout.flush()
        os.write(1, f"done {os.environ['RANK']}\n".encode())  # at once: mpirun mixes the pieces of lines
