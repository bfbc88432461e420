"""The torch.distributed backend "evenstep": our shared-memory collectives for CPU tensors, our NCCL engine for CUDA
tensors, torch's Gloo and NCCL beneath for what is left."""

# torch's stubs differ from version to version and from what it calls; what it calls is what is here.
# mypy: disable-error-code="override,attr-defined,name-defined,call-arg,no-any-return"

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from evenstep import _core
from evenstep.backend_device import DeviceCollectives, limited_by
from evenstep.backend_exchange import ExchangeMixin
from evenstep.backend_forms import in_full
from evenstep.backend_gloo import in_place, reading
from evenstep.backend_legs import device_collectives
from evenstep.backend_lists import heard
from evenstep.backend_messages import MessagesMixin
from evenstep.backend_monitored import MonitoredMixin
from evenstep.backend_older import OlderNamesMixin, ended, keep_works_for_cpp, shut_down_with_torch
from evenstep.backend_sparse import sparse_reduction
from evenstep.backend_staged import StagedMixin
from evenstep.backend_tensors import (
    WAITS_UNASKED,
    apart,
    as_real,
    check_outputs,
    elements_of,
    factor_of,
    given_options,
    is_ours,
    landing,
    limit_of,
    named,
    of_inference,
    op_of,
    plain,
    premultiplied,
    reducer_of,
    reducible,
    refuse,
    root_of,
    scaled,
    sources_as_real,
    wants_work,
)
from evenstep.backend_watched import let_watch, modes, profiler, seen, within
from evenstep.backend_work import Worker, finished
from evenstep.comm_debug import explain, note
from evenstep.device_groups import DeviceGroups, engine_version, nccl_library
from evenstep.device_places import has_xccl, open_xccl, over_hosts_among, said_over_hosts
from evenstep.device_streams import CudaStreams
from evenstep.exits import left_in_children
from evenstep.gloo_group import open_gloo, told_to_all
from evenstep.group_end import end_calls
from evenstep.hosts import this_host
from evenstep.hosts_over_gloo import REDUCED, Collectives, HostsOverGloo, open_hosts_over_gloo
from evenstep.rendezvous import OverGloo, begin_world, open_group


class EvenstepGroup(MessagesMixin, ExchangeMixin, MonitoredMixin, StagedMixin, OlderNamesMixin, dist.ProcessGroup):
    """A process group of torch over an engine group; see `docs/communication.md` for what runs where."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        name: str,
        members: Sequence[int] | None = None,
        backends: Mapping[str, str] | None = None,
    ) -> None:
        """`backends`: by kinds of devices, whose tensors go to torch's own where they say so."""
        super().__init__(rank, size)
        chosen = backends or {}
        self._rank = rank
        self._size = size
        self._store = store
        self._timeout = timeout
        self._name = name
        self._members = members
        self._sequence = self._monitored = 0
        self._later: Worker | None = None
        self._messages = []
        self._messages_lock = threading.Lock()
        self._host_calls = None
        self._told = set()
        heard: list[OverGloo] = []
        comm = open_group(
            store,
            rank,
            size,
            name=f"torch/{name}",
            timeout_seconds=timeout.total_seconds(),
            members=members,
            over_gloo=heard.append,
        )
        self._board = comm  # by which GPUs' ranks watch one another
        by_gloo = chosen.get("cpu") == "gloo"
        if by_gloo:
            note(f"group torch/{name}: CPU tensors go to torch's Gloo, as the list of backends says", rank)
        self._comm = None if by_gloo else comm
        self._reducer = reducer_of(self._comm)
        self._devices: DeviceCollectives | None = None
        self._devices_chosen = chosen.get("cuda") == "nccl"
        self._torch_nccl: Any = None
        self._life = ""
        host_of = heard[0].host_of if heard else []
        word = (
            heard[0].word if comm is None else told_to_all(lambda word: comm.broadcast(word.data_ptr(), word.nbytes, 0))
        )
        self._beneath = self._open_beneath(word)
        self._engine = self._open_hosts(host_of) if host_of and not by_gloo else self._comm
        self._own = self._board if self._engine is None else self._engine  # what is ours, and ends with the group

    def _open_beneath(self, word: str) -> dict[str, Any]:
        """torch's own backends for all that the engine does not do, registered where C++ looks for them. `word`: no
        earlier group over this store had it, whose keys would hang a group of its name."""
        backends: dict[str, Any] = {}
        store = dist.PrefixStore(f"evenstep-{word}/", self._store)
        self._device_store = dist.PrefixStore("device/", store)
        version = engine_version() if torch.cuda.is_available() else 0
        self._device_store.set(f"engine/{self._rank}", json.dumps([version, this_host(), said_over_hosts()]))
        gloo, self._life = open_gloo(store, self._rank, self._size, self._timeout)
        backends["cpu"] = left_in_children(gloo)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        if dist.is_nccl_available() and torch.cuda.is_available():
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl/", store), self._rank, self._size, options)
            backends["cuda"] = self._torch_nccl = nccl
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        if has_xccl():
            xccl = open_xccl(dist.PrefixStore("xccl/", store), self._rank, self._size, self._timeout)
            backends["xpu"] = xccl
            self._register_backend(torch.device("xpu"), dist.ProcessGroup.BackendType.XCCL, xccl)
        return backends

    def _open_hosts(self, host_of: list[int]) -> HostsOverGloo:
        """What makes collectives of CPU tensors where no engine of ours connects the hosts; what it has not goes over Gloo between all
        ranks."""
        place = f"hosts/{self._life}"
        return open_hosts_over_gloo(self._store, place, self._rank, host_of, self._name, self._timeout, self._members)

    @property
    def over_hosts_by_gloo(self) -> str:
        """How shared memory connects ranks of a host, and Gloo the hosts; "": it is not so."""
        return self._engine.description if isinstance(self._engine, HostsOverGloo) else ""

    def _reducible(self, tensor: torch.Tensor, op: int | None) -> int | None:
        """The dtype's number where this group's engine can reduce the tensor so."""
        dtype = reducible(tensor, op)
        return dtype if dtype in REDUCED or not self.over_hosts_by_gloo else None

    def _choose_for_devices(self) -> None:
        """CUDA tensors go to our NCCL engine where every rank has it, else to torch's; the first call finds it out."""
        self._devices_chosen = True
        keys = [f"engine/{rank}" for rank in range(self._size)]
        self._device_store.wait(keys, self._timeout)
        versions, hosts, wishes = zip(*(json.loads(self._device_store.get(key)) for key in keys))
        without = [rank for rank, version in enumerate(versions) if version == 0]
        ours = f"our NCCL engine (NCCL {min(versions)})"
        theirs = "torch's NCCL" if self._torch_nccl is not None else "nothing"
        note(
            f"group torch/{self._name}: CUDA tensors go to "
            + (f"{theirs}: ours was not found, or not wanted, on the ranks {without}" if without else ours),
            self._rank,
        )
        if not without:
            streams = CudaStreams()
            seconds = self._timeout.total_seconds()
            groups = DeviceGroups(
                self._device_store,
                self._rank,
                self._size,
                seconds,
                streams.identity,
                library=nccl_library(),
                beside=self._board,
                name=f"torch/{self._name}/device",
                members=self._members,
            )
            wanted = self.over_hosts or over_hosts_among(hosts, wishes)
            self._devices = self._beneath["cuda"] = device_collectives(groups, streams, hosts, wanted)

    def _under(self, tensor: torch.Tensor) -> Any:
        return self._for_device(tensor.device)

    def _for_device(self, device: torch.device) -> Any:
        if device.type == "cuda" and not self._devices_chosen:
            self._choose_for_devices()
        backend = self._beneath.get(device.type)
        if backend is None:
            raise _core.EvenstepError(
                f'backend "evenstep" has nothing for tensors on {device}\n'
                "  fix: use CPU, CUDA or XPU tensors (CUDA needs NCCL: pip install nvidia-nccl-cu13, or a torch built with it; "
                "XPU a torch built with XCCL)"
            )
        return backend

    # -- what torch asks a group about itself --

    def getBackendName(self) -> str:
        return "evenstep"

    def name(self) -> str:
        return "evenstep"

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    @property
    def pg_name(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._own is not None:
            self._own.set_timeout(timeout.total_seconds())
        for backend in self._all_beneath():
            set_default = getattr(backend, "_set_default_timeout", None)
            if set_default is not None:
                set_default(timeout)

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Every group counts from zero."""

    def shutdown(self) -> None:
        if self._later is not None and self._engine is not None and not self._engine.closed:
            self._later.settle()  # what this rank has begun, others wait for
        explain(f"torch/{self._name}", self._comm, "at its end")
        if self._own is not None:
            self._own.close()
        self._end_records()
        if self._later is not None:
            self._later.stop()
            self._later = None
        if self._host_calls is not None:
            self._host_calls.stop()
        for backend in self._all_beneath():
            ended(backend, "shutdown")

    def abort(self) -> None:
        if self._own is not None and not self._own.closed:
            self._own.revoke()
        for backend in self._all_beneath():
            ended(backend, "abort")

    def end_over_gloo(self) -> None:
        """Ends the calls of CPU tensors, those under way and those to come, where no engine of ours has them all. Any thread."""
        if self._engine is not None:
            self._engine.revoke()
        end_calls(self._beneath["cpu"])

    def _all_beneath(self) -> list[Any]:
        """What is registered for C++ as well, though it may never be called."""
        also = [self._torch_nccl] if self._devices is not None and self._torch_nccl is not None else []
        return [*self._beneath.values(), *also]

    # -- the engine's collectives --

    def _run(self, options: Any, job: Callable[[], None], result: Any) -> Any:
        """Does `job` now, or on the group's thread where the caller wants a Work to wait for."""
        check_outputs(result)
        self._sequence += 1
        if of_inference(result):
            job = torch.inference_mode()(job)
        job = self._within(limit_of(options), job)
        if getattr(options, "asyncOp", True) and self._size > 1:
            return self._worker().submit(job, result)
        if self._later is not None:
            self._later.settle()
        with torch.no_grad():
            job()
        # torch's Python functions that wait anyway take None for "complete".
        return finished(result) if wants_work(options) else None

    def _worker(self) -> Worker:
        if self._later is None or not self._later.alive():  # none in a child that was forked
            self._later = Worker()
        return self._later

    def _within(self, seconds: float, job: Callable[[], None]) -> Callable[[], None]:
        """`job` with a time limit of its own where the call has one."""
        comm = self._engine
        if comm is None or not seconds:
            return job

        def limited() -> None:
            with limited_by(comm, seconds, self._timeout.total_seconds()):
                job()

        return limited

    def _all_reduce(self, comm: Collectives, tensor: torch.Tensor, dtype: int, op: int) -> None:
        data = plain(tensor)
        comm.all_reduce(data.data_ptr(), data.numel(), dtype, op)
        if data is not tensor:
            tensor.copy_(data)

    def _reduction(self, given: Sequence[torch.Tensor], options: Any) -> Callable[[], None] | None:
        """All-reduces each tensor; None where one of them is not for the engine."""
        comm, op = self._engine, op_of(options)
        if comm is None or op is None:
            return None
        tensors, factor = as_real(given, op), factor_of(options)
        dtypes = [self._reducible(tensor, op) for tensor in tensors]
        if None in dtypes:
            refuse(tensors, op)
            return None

        def job() -> None:
            for tensor, dtype in zip(tensors, dtypes):
                if factor is not None:
                    tensor.mul_(factor)
                self._all_reduce(comm, tensor, dtype, op)  # type: ignore[arg-type]

        return job

    def allreduce(self, tensors: Any = None, opts: Any = None, timeout: Any = None, **named: Any) -> Any:
        if named or timeout is not None:  # else the second may be an operation as well
            given = [] if tensors is None else [tensors]
            tensors, opts = in_full("allreduce", given, {"opts": opts, "timeout": timeout, **named})
        if (profiler._is_profiler_enabled or modes()) and not within.call:
            return seen(self, EvenstepGroup.allreduce, (tensors, opts), {})
        self.calls_made += 1
        later, reducer = self._later, self._reducer
        if reducer is not None and self._size > 1 and getattr(opts, "asyncOp", False):
            worker = self._worker() if isinstance(tensors, list) and all(map(is_ours, tensors)) else None
            work = None if worker is None or worker.is_mine() else worker.submit_all_reduce(reducer, tensors, opts)
            if work is not None:
                self._sequence += 1
                return work
        elif reducer is not None and (later is None or later.idle()) and reducer(tensors, opts):
            self._sequence += 1
            return None
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        job = self._reduction(given, opts) if len(given) == 1 else None
        if job is None and (lacks := self._lacking(given, opts)):
            return self._staged(self.allreduce, lacks, (given,), opts)
        if job is None and factor_of(opts) is None:
            job = sparse_reduction(self._comm, given, op_of(opts))
        if job is None:
            return in_place(self._under(given[0]).allreduce, given, opts)
        return self._run(opts, job, given)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        job = self._reduction(tensors, opts)
        if job is None and (lacks := self._lacking(tensors, opts)):
            return self._staged(self.allreduce_coalesced, lacks, (tensors,), opts)
        if job is None:
            return in_place(self._under(tensors[0]).allreduce_coalesced, tensors, opts)
        return self._run(opts, job, tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        comm, tensor = self._engine, given[0]
        if comm is None or len(given) != 1 or not is_ours(tensor):
            return in_place(self._under(tensor).broadcast, given, opts)
        root = root_of(opts, "broadcast", self._size)

        def job() -> None:
            data = plain(tensor)
            comm.broadcast(data.data_ptr(), data.nbytes, root, elements_of(data))
            if data is not tensor and self._rank != root:
                tensor.copy_(data)

        return self._run(opts, job, given)

    def _check_gather_parts(self, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """The engine reads as much of `own` as this rank's part is long: they must agree."""
        if parts[self._rank].numel() != own.numel() or any(part.dtype != own.dtype for part in parts):
            raise ValueError(
                f"all_gather of {own.numel()} {own.dtype} elements on rank {self._rank} needs outputs of that dtype, "
                f"the one of this rank as large; got {[(part.numel(), part.dtype) for part in parts]}"
            )

    def _gather_parts(self, comm: Collectives, parts: Sequence[torch.Tensor], own: torch.Tensor) -> None:
        """parts[r] = rank r's `own`; the parts may differ in size. Bytes are gathered, whatever the dtype."""
        counts = [part.nbytes for part in parts]
        everything = torch.empty(sum(counts), dtype=torch.uint8)
        source = plain(own)
        elements = max(map(elements_of, parts))  # that of all but the empty ones
        comm.all_gather(source.data_ptr(), everything.data_ptr(), counts, _core.DTYPE_U8, elements)
        for part, data in zip(parts, everything.split(counts)):
            part.copy_(data.view(part.dtype).view(part.shape) if part.numel() else part)

    def _gather_single(self, comm: Collectives, output: torch.Tensor, own: torch.Tensor) -> None:
        target = landing(output)
        source = apart(plain(own), [target], -own.nbytes * self._rank)
        counts = [own.nbytes] * self._size
        comm.all_gather(source.data_ptr(), target.data_ptr(), counts, _core.DTYPE_U8, elements_of(own))
        if target is not output:
            output.copy_(target)

    def _check_gather(self, output: torch.Tensor, own: torch.Tensor) -> None:
        if output.nbytes != own.nbytes * self._size or output.dtype != own.dtype:
            raise ValueError(
                f"all_gather_single of {own.numel()} {own.dtype} elements on each of {self._size} ranks needs an "
                f"output of {own.numel() * self._size}, not of {output.numel()} {output.dtype} elements"
            )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        comm = self._engine
        ours = comm is not None and len(inputs) == 1 and is_ours(inputs[0]) and all(map(is_ours, outputs[0]))
        if comm is None or not ours or len(outputs[0]) != self._size:
            return reading(self._under(inputs[0]).allgather, outputs, inputs, *given_options(opts))
        self._check_gather_parts(outputs[0], inputs[0])
        parts, own = list(outputs[0]), inputs[0]  # the caller may change its lists before the turn of the call
        return self._run(opts, lambda: self._gather_parts(comm, parts, own), outputs)

    def allgather_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        """output_lists[r][i] = rank r's input_list[i]."""
        comm = self._engine
        everything = [*input_list, *(output for outputs in output_lists for output in outputs)]
        fits = len(output_lists) == self._size and all(len(outputs) == len(input_list) for outputs in output_lists)
        if comm is None or not fits or not all(map(is_ours, everything)):
            call = self._under(input_list[0]).allgather_coalesced
            return reading(call, output_lists, input_list, *given_options(opts))
        gathers = [([outputs[i] for outputs in output_lists], own) for i, own in enumerate(input_list)]
        for parts, own in gathers:
            self._check_gather_parts(parts, own)

        def job() -> None:
            for parts, own in gathers:
                self._gather_parts(comm, parts, own)

        return self._run(opts, job, output_lists)

    def _gathering(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        comm = self._engine
        if comm is None or not all(map(is_ours, outputs)) or not all(map(is_ours, inputs)):
            return None
        pairs = list(zip(outputs, inputs))
        for output, own in pairs:
            self._check_gather(output, own)

        def job() -> None:
            for output, own in pairs:
                self._gather_single(comm, output, own)

        return job

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> Any:
        job = self._gathering([output], [input])
        if job is None:
            call = named(self._under(input), "all_gather_single", "_allgather_base")
            return reading(call, output, input, *given_options(opts))
        return self._run(opts, job, [output])

    def all_gather_single_coalesced(self, output_lists: Any, input_list: Any, opts: Any = None) -> Any:
        job = self._gathering(output_lists, input_list)
        if job is None:
            call = named(self._under(input_list[0]), "all_gather_single_coalesced", "allgather_into_tensor_coalesced")
            return reading(call, output_lists, input_list, *given_options(opts))
        return self._run(opts, job, output_lists)

    def _scatter(
        self, comm: Collectives, output: torch.Tensor, flat: torch.Tensor, counts: Sequence[int], dtype: int, op: int
    ) -> None:
        """output = op over ranks of this rank's part of `flat`, which is contiguous."""
        target = landing(output)
        flat = apart(flat, [target], sum(counts[: self._rank]) * flat.element_size())
        comm.reduce_scatter(flat.data_ptr(), target.data_ptr(), counts, dtype, op)
        if target is not output:
            output.copy_(target)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        comm, op, factor = self._engine, op_of(opts), factor_of(opts)
        output, parts = as_real(outputs, op)[0], sources_as_real(inputs[0], op)
        dtype = self._reducible(output, op)
        if comm is None or dtype is None or op is None or len(outputs) != 1 or not all(map(is_ours, parts)):
            if lacks := self._lacking([*outputs, *inputs[0]], opts):
                return self._staged(self.reduce_scatter, lacks, (outputs, inputs), opts)
            refuse(outputs if comm is not None else (), op)
            with premultiplied(inputs[0], opts) as (summed, options):
                return reading(self._under(outputs[0]).reduce_scatter, outputs, [summed, *inputs[1:]], *options)
        given = [part.numel() for part in inputs[0]]
        fits = len(parts) == self._size and outputs[0].numel() == given[self._rank]
        if not fits or any(part.dtype != output.dtype for part in parts):
            raise ValueError(
                f"reduce_scatter needs {self._size} inputs, the one of this rank as large as its output, of one dtype; "
                f"got inputs of {given} elements and an output of {outputs[0].numel()} {outputs[0].dtype}"
            )
        counts = [part.numel() for part in parts]

        def job() -> None:
            flat = torch.cat([scaled(part, factor).view(-1) for part in parts])
            self._scatter(comm, output, flat, counts, dtype, op)

        return self._run(opts, job, outputs)

    def _scattering(
        self, given_outputs: Sequence[torch.Tensor], given_inputs: Sequence[torch.Tensor], options: Any
    ) -> Callable[[], None] | None:
        comm, op = self._engine, op_of(options)
        if comm is None or op is None:
            return None
        outputs, inputs, factor = as_real(given_outputs, op), sources_as_real(given_inputs, op), factor_of(options)
        dtypes = [self._reducible(output, op) for output in outputs]
        if None in dtypes or not all(map(is_ours, inputs)):
            refuse(outputs, op)
            return None
        for output, whole in zip(outputs, inputs):
            if whole.numel() != output.numel() * self._size or whole.dtype != output.dtype:
                raise ValueError(
                    f"reduce_scatter_single into {output.numel()} {output.dtype} elements on each of {self._size} "
                    f"ranks needs an input of {output.numel() * self._size}, not of {whole.numel()} {whole.dtype}"
                )

        def job() -> None:
            for output, whole, dtype in zip(outputs, inputs, dtypes):
                counts = [output.numel()] * self._size
                self._scatter(comm, output, scaled(whole, factor), counts, dtype, op)  # type: ignore[arg-type]

        return job

    def reduce_scatter_single(self, outputTensor: Any, inputTensor: Any, opts: Any = None) -> Any:
        job = self._scattering([outputTensor], [inputTensor], opts)
        if job is None and (lacks := self._lacking([outputTensor, inputTensor], opts)):
            return self._staged(self.reduce_scatter_single_coalesced, lacks, ([outputTensor], [inputTensor]), opts)
        if job is None:
            call = named(self._under(inputTensor), "reduce_scatter_single", "_reduce_scatter_base")
            with premultiplied([inputTensor], opts) as ((summed,), options):
                return reading(call, outputTensor, summed, *options)
        return self._run(opts, job, [outputTensor])

    def reduce_scatter_single_coalesced(self, outputTensors: Any, inputTensors: Any, opts: Any = None) -> Any:
        job = self._scattering(outputTensors, inputTensors, opts)
        if job is None and (lacks := self._lacking([*outputTensors, *inputTensors], opts)):
            return self._staged(self.reduce_scatter_single_coalesced, lacks, (outputTensors, inputTensors), opts)
        if job is None:
            call = named(
                self._under(inputTensors[0]), "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
            )
            with premultiplied(inputTensors, opts) as (summed, options):
                return reading(call, outputTensors, summed, *options)
        return self._run(opts, job, outputTensors)

    def barrier(self, opts: Any = None) -> Any:
        if self._engine is None:
            return self._beneath["cpu"].barrier(*given_options(opts))
        return self._run(opts, self._engine.barrier, [])


let_watch(EvenstepGroup)
if WAITS_UNASKED:
    keep_works_for_cpp(EvenstepGroup)
    shut_down_with_torch(EvenstepGroup)


def create_group(options: Any, backend_options: Any) -> EvenstepGroup:
    """What torch calls to make a group (extended API of `Backend.register_backend`)."""
    del backend_options  # the backend has no options of its own
    members = list(getattr(options, "global_ranks_in_group", None) or range(options.group_size))
    if len(set(members)) < len(members):  # which torch 2.6 to 2.11 do not refuse
        raise ValueError(f"the new group has duplicate ranks: {members}")
    if not dist.is_initialized():
        begin_world()
    return EvenstepGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        str(options.group_id or "default"),
        members,
        heard(),
    )
