"""Scripts that are written for GPUs and NCCL run on CPU ranks and backend "evenstep", as they are: with this folder on PYTHONPATH
every process that they start answers "cpu" where they ask for the accelerator, leaves `.to(rank)` and `device_ids` without effect,
and gives `init_process_group` the backend. EVENSTEP_ON_CPU has the number of ranks; without it nothing is done. When a process
leaves its groups it prints how many collectives they made ("evenstep: rank 0 made 12 collectives in 1 group"), and what it loads
("evenstep: rank 0 loaded snapshot.pt")."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

RANKS = int(os.environ.get("EVENSTEP_ON_CPU", "0"))


def _is_of_gpu(place: Any) -> bool:
    return isinstance(place, int) or (isinstance(place, str) and place.startswith("cuda"))


def _on_cpu(to: Callable[..., Any]) -> Callable[..., Any]:
    """`to` of a tensor or module."""

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and _is_of_gpu(args[0]):
            args = ("cpu", *args[1:])
        if _is_of_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return to(self, *args, **kwargs)

    return moved


def _accelerator_is_the_cpu() -> None:
    import torch

    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: True
    accelerator.device_count = torch.cuda.device_count = lambda: RANKS
    accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")
    accelerator.set_device_index = accelerator.device_index = lambda index: None
    torch.cuda.set_device = lambda device: None
    torch.Tensor.to = _on_cpu(torch.Tensor.to)  # type: ignore[method-assign]
    torch.nn.Module.to = _on_cpu(torch.nn.Module.to)  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, device=None: self  # type: ignore[method-assign, assignment]
    torch.backends.cuda.enable_flash_sdp(False)  # attention on CPUs, which DTensor has no rule for, where it is flash's


def _wrap_ddp() -> None:
    import torch

    init = torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(init)
    def on_cpu(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        init(self, module, None, *args, **kwargs)

    torch.nn.parallel.DistributedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]


def _tell_loads() -> None:
    import torch

    load = torch.load

    @functools.wraps(load)
    def loaded(file: Any, *args: Any, **kwargs: Any) -> Any:
        content = load(file, *args, **kwargs)
        print(f"evenstep: rank {os.environ.get('RANK', '0')} loaded {file}", flush=True)
        return content

    torch.load = loaded


def _tell(dist: Any) -> None:
    groups = [group for group in dist.distributed_c10d._world.pg_map if type(group).__name__ == "EvenstepGroup"]
    calls = sum(group._get_sequence_number_for_group() for group in groups)
    noun = "group" if len(groups) == 1 else "groups"
    print(f"evenstep: rank {dist.get_rank()} made {calls} collectives in {len(groups)} {noun}", flush=True)


def _give_backend() -> None:
    import torch.distributed as dist
    from torch.distributed import device_mesh, distributed_c10d

    import evenstep  # noqa: F401  # registers the backend

    begin, end = dist.init_process_group, dist.destroy_process_group

    @functools.wraps(begin)
    def begun(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        begin("evenstep", *args, **kwargs)

    @functools.wraps(end)
    def ended(group: Any = None) -> None:
        if group is None:
            _tell(dist)
        end(group)

    for module in (dist, distributed_c10d, device_mesh):
        module.init_process_group = begun  # type: ignore[attr-defined]
    dist.destroy_process_group = distributed_c10d.destroy_process_group = ended


if RANKS:
    _accelerator_is_the_cpu()
    _wrap_ddp()
    _tell_loads()
    _give_backend()
