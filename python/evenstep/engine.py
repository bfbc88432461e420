"""What engines are that form sum_r weight_r * gradient_r, and the one in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from evenstep import _core, comm_costs
from evenstep.compression import ENCODINGS, WAYS, WIRES, Compression
from evenstep.group import DTYPES
from evenstep.sharded_gradients import ShardedGradient

if TYPE_CHECKING:
    from evenstep.group import Bootstrap

FIRST_BUCKET_BYTES = 256 << 10  # of the engine in C


@dataclass(frozen=True)
class EngineOptions:
    """What es.prepare was told about the exchange of gradients."""

    engine: str | None = None  # "shared", "torch"; None: chosen
    compression: Compression | None = None
    bucket_bytes: int = 0  # 0: the engine's own
    bucket_elements: int = 0  # or the same in elements
    adasum: bool = False
    seed: int = 0  # of what is rounded at random
    way: str = (
        "auto"  # of what is encoded: "gather" to all, "parts" that are added up by one rank each; auto: the cheaper
    )
    unsummed: bool = False  # each rank's part stays with it: es.optim adds up (shard_gradients)
    static_graph: bool = False  # the same parameters have gradients in every round
    sums: bool = False  # losses are sums over samples: each rank that has some weighs 1

    def bucket_limit(self, element_bytes: int, own: int) -> int:
        """Bytes of a bucket of such elements, where an engine has a size of its own."""
        return self.bucket_elements * element_bytes or self.bucket_bytes or own

    @property
    def gathers(self) -> bool:
        """Whether the gradients go another way than an all-reduce in their own type or in 16 bits."""
        return self.adasum or (self.compression is not None and self.compression.name not in WIRES)

    @property
    def encodes(self) -> bool:
        """Whether they travel as int8, onebit or topk."""
        return self.compression is not None and self.compression.name in ENCODINGS


class Report:
    """What one round cost, in nanoseconds. full_bytes: what `bytes` would be without compression. own_ns: of exposed_ns,
    what this rank did by itself after its last meeting with the others, as putting sums back into its device's memory."""

    __slots__ = ("bytes", "communication_ns", "exposed_ns", "full_bytes", "own_ns", "peer_wait_ns")

    def __init__(
        self,
        communication_ns: int,
        peer_wait_ns: int,
        exposed_ns: int,
        moved: int,
        full: int | None = None,
        own_ns: int = 0,
    ) -> None:
        self.full_bytes = moved if full is None else full
        self.communication_ns = communication_ns
        self.peer_wait_ns = peer_wait_ns
        self.exposed_ns = exposed_ns
        self.own_ns = own_ns
        self.bytes = moved

    @classmethod
    def of_others(cls, reports: Sequence[Report]) -> Report:
        """What rounds of other steps cost this one."""
        moved, full = sum(one.bytes for one in reports), sum(one.full_bytes for one in reports)
        return cls(0, 0, sum(one.exposed_ns for one in reports), moved, full)

    def goes_on(self, second: Report) -> None:
        """A second round was needed."""
        self.communication_ns += second.communication_ns
        self.peer_wait_ns += second.peer_wait_ns
        self.exposed_ns += second.exposed_ns
        self.own_ns = second.own_ns
        self.bytes += second.bytes
        self.full_bytes += second.full_bytes


class Engine(Protocol):
    """A round: begin, ready for each gradient as it comes, finish. views[i] is where parameter i's sum will lie."""

    views: list[torch.Tensor]

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        """What else of its own shares the memory of the views."""

    def begin(self, weight: float, step: int) -> None: ...

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient's memory must stay as it is until finish."""

    def finish(self) -> tuple[Sequence[int], Report]:
        """used[i] is 1 where some rank had a gradient for parameter i; collective.

        An engine may have more: `complete()`, once all that this rank has is ready, after which other ranks do not wait for its finish
        (nor this one for theirs); `settle()`, after backward, waits for what this rank does for the exchange by itself, and for
        no other rank; `give_up()` ends a round that counts nothing, so that no rank waits for another for ever; `end_calls()`
        does so where training has ended by an error, and there is no other round; `discard()`, in a round of which nobody will use
        the sums, so that what an encoding leaves out of it is not kept; `keep(indices)`, after it: of these parameters somebody does,
        as the next round's gradients, and what was left out of them waits for that; `know(used)`,
        between rounds, where `asks_once` is True, says what `used` is from then on, and no rank asks the others (None: again
        they do). These three are the same on all ranks.
        """


@runtime_checkable
class LastingEngine(Protocol):
    """One whose ranks may be lost while the others go on. Each kind makes the communicator of the next generation by its own means:
    a group of ours in the host's memory, or one of torch's."""

    def revoke(self) -> None:
        """Ends what the other ranks, and this one, wait for in the generation that is over."""

    def meet_again(self, bootstrap: Bootstrap) -> Any:
        """The communicator of the generation that begins, by `bootstrap`. Collective; raises what ends it where a rank is lost
        meanwhile, or there is a newer generation. The engine stays as it is."""

    def again(self, comm: Any) -> Any:
        """Another engine for the same parameters, over what `meet_again` gave; this one has ended, whatever round was open."""


def memory_format_of(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a gradient as autograd lays it out: the parameter's own where it is dense."""
    with torch.no_grad():
        like = torch.empty_like(parameter, device="meta")
    return tuple(like.shape), tuple(like.stride())


def _shapes(parameters: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    return [(p.numel(), DTYPES[p.dtype]) for p in parameters]


class SharedEngine:
    """Buckets in the group's arena, reduced by a thread without the GIL while backward runs.

    Gradients that lie elsewhere (another device, other strides) are copied into their slot first.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        comm: _core.Comm,
        telemetry: _core.Telemetry | None = None,
        options: EngineOptions = EngineOptions(),
    ) -> None:
        self._comm, self._telemetry, self._options = comm, telemetry, options
        self._parameters = parameters
        self._on_cpu = [p.device.type == "cpu" for p in parameters]
        self._held: list[Any] = [None] * len(parameters)
        self.views = [torch.empty(0) if on_cpu else torch.empty_like(p) for p, on_cpu in zip(parameters, self._on_cpu)]
        self._slots: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._place = list(range(len(parameters)))  # of each parameter in the engine in C
        self._late: frozenset[int] = frozenset()
        self._sizes = 0, 0  # of buckets and of the first; 0: as the options say
        self._known: bytes | None = None
        self.beside_others = False  # other ranks' gradients come through engines of another kind
        self.shape = comm_costs.followed  # of the group, on its rank 0, which has just been opened
        self.nonfinite: list[tuple[int, bool]] = []  # as evenstep.nonfinite.Found, of the last round
        self._open(_shapes(parameters))

    def _open(self, shapes: Sequence[tuple[int, int] | tuple[int, int, bool]]) -> None:
        self._sync = _core.Sync(self._comm, shapes, telemetry=self._telemetry, **_in_c(self._options, self._sizes))
        if self._known is not None:
            self.know(self._known)
        arena = self._comm.arena()
        self._slots.clear()
        self._addresses.clear()
        for index, parameter in enumerate(self._parameters):
            flat = torch.empty(0, dtype=parameter.dtype)
            if parameter.numel():
                at = self._sync.offset(self._place[index])
                flat = torch.frombuffer(arena, dtype=parameter.dtype, count=parameter.numel(), offset=at)
            shape, stride = memory_format_of(parameter)
            slot = flat.as_strided(shape, stride)
            self._slots.append(slot)
            self._addresses.append(slot.data_ptr())
            if self._on_cpu[index]:
                self.views[index] = slot.detach()

    def reorder(self, order: Sequence[int], late: Sequence[int]) -> bool:
        """Between rounds: fills the buckets with the parameters of `order` as they come there, those of `late` in buckets of
        their own, reduced last. The views are other memory then. False, and nothing done, where the arena is too small
        for it. The same on all ranks."""
        return self._lay_out([*order, *late], frozenset(late), self._sizes)

    def resize(self, bucket_bytes: int, first_bucket_bytes: int) -> bool:
        """Between rounds: buckets of other sizes (0: as the options say), as `reorder` does it. Sums are the same to the bit."""
        return self._lay_out(self._reduced, self._late, (bucket_bytes, first_bucket_bytes))

    @property
    def _reduced(self) -> list[int]:
        """The parameters in the order in which buckets take them."""
        return self._at[::-1]  # they are filled from the end

    def _lay_out(self, reduced: Sequence[int], late: frozenset[int], sizes: tuple[int, int]) -> bool:
        shapes = self._shapes_of(reduced, late)
        if _core.Sync.arena_bytes(shapes, **_layout_in_c(self._options, sizes)) > len(self._comm.arena()):
            return False
        for place, index in enumerate(reversed(reduced)):
            self._place[index] = place
        self._late, self._sizes = late, sizes
        self._sync.close()
        self._open(shapes)
        return True

    def _shapes_of(self, reduced: Sequence[int], late: frozenset[int]) -> list[tuple[int, int, bool]]:
        whole = _shapes(self._parameters)
        return [(*whole[index], index in late) for index in reversed(reduced)]

    @property
    def chooses_sizes(self) -> bool:
        """Whether buckets may have other sizes: nobody said which, and sums do not depend on it."""
        options = self._options
        said = options.bucket_bytes or options.bucket_elements or options.encodes
        alone = self.beside_others or self._comm.ranks < 2  # all ranks measure and decide together
        return not said and not alone and self.plain and not options.unsummed

    @property
    def asks_once(self) -> bool:
        return type(self) is SharedEngine and not self.beside_others and _is_marked(self._options)

    def know(self, used: bytes | None) -> None:
        self._known = used
        if self._parameters and _is_marked(self._options):
            self._sync.know(None if used is None else bytes(used[index] for index in self._at))

    @property
    def _at(self) -> list[int]:
        """The parameter at each place."""
        return sorted(range(len(self._place)), key=self._place.__getitem__)

    def part(self, index: int) -> ShardedGradient | None:
        """What p.grad is after a round that leaves sums to es.optim; None where this engine forms them."""
        if not self._options.unsummed:
            return None
        parameter = self._parameters[index]
        return ShardedGradient(parameter, self._slots[index].stride(), self._comm, self._addresses[index])

    @property
    def comm(self) -> _core.Comm:
        return self._comm

    def better_sizes(
        self, ready: Sequence[float], end: float, costs: _core.CommCosts, shape: str
    ) -> tuple[int, int, float, float]:
        """Of buckets and of the first (0, 0: as it is) by what calls cost, and when the exchange ends, by that, as it is and
        then. ready: seconds after which each parameter's gradient is there; end: backward is over."""
        reduced = self._reduced
        shapes = self._shapes_of(reduced, self._late)
        moments = [ready[index] for index in reversed(reduced)]
        room = len(self._comm.arena())
        wire = _layout_in_c(self._options)["wire"]
        return _core.Sync.choose_sizes(shapes, moments, end, costs, shape, self._comm.engine, room, wire)

    @property
    def memory(self) -> Sequence[torch.Tensor]:
        return self._slots

    @property
    def plain(self) -> bool:
        """Whether all parameters are in the host's memory."""
        return all(self._on_cpu)

    def meet_again(self, bootstrap: Bootstrap) -> _core.Comm:
        """The group in which another one for the same parameters adds up. Collective."""
        arena = bootstrap.shared(self.arena_bytes(self._parameters, self._options), "gradients")
        assert arena is not None
        return arena

    def revoke(self) -> None:
        """Ends what the other ranks wait for."""
        self._comm.revoke()

    def again(self, comm: _core.Comm) -> SharedEngine:
        """Another one for the same parameters; this one has ended, whatever round was open."""
        self.close()
        return type(self)(self._parameters, comm, self._telemetry, self._options)

    def close(self) -> None:
        """It has ended, whatever round was open."""
        self._sync.close()
        self._held = [None] * len(self._parameters)

    @property
    def made_of(self) -> tuple[Sequence[torch.Tensor], _core.Telemetry | None, EngineOptions]:
        """What another one for the same parameters is made of, too."""
        return self._parameters, self._telemetry, self._options

    @staticmethod
    def arena_bytes(parameters: Sequence[torch.Tensor], options: EngineOptions = EngineOptions()) -> int:
        return _core.Sync.arena_bytes(_shapes(parameters), **_layout_in_c(options))

    def begin(self, weight: float, step: int) -> None:
        self._sync.begin(weight, step)

    def ready(self, index: int, gradient: torch.Tensor) -> None:
        slot = self._slots[index]
        address = gradient.data_ptr()
        if (
            address != self._addresses[index]
            and self._on_cpu[index]
            and gradient.dtype == slot.dtype
            and gradient.stride() == slot.stride()
        ):
            self._held[index] = gradient
            self._sync.ready(self._place[index], address)
            return
        if address != self._addresses[index]:
            slot.copy_(gradient)
        self._sync.ready(self._place[index], self._addresses[index])

    def complete(self) -> None:
        self._sync.complete()

    def finish(self) -> tuple[Sequence[int], Report]:
        flags, _, communication_ns, peer_wait_ns, exposed_ns, moved, _, full, bad = self._sync.finish()
        used = bytes(map(flags.__getitem__, self._place))
        self.nonfinite = [(self._place.index(place), own) for place, own in self._sync.nonfinite()] if bad else []
        own_ns = 0 if self.plain else self._put_back(used)
        self._held = [None] * len(self._held)
        return used, Report(communication_ns, peer_wait_ns, exposed_ns + own_ns, moved, full, own_ns)

    def _put_back(self, used: Sequence[int]) -> int:
        """The sums of parameters that are on a device; how long it took."""
        start = _core.clock_ns()
        for index, on_cpu in enumerate(self._on_cpu):
            if not on_cpu and used[index]:
                self.views[index].copy_(self._slots[index])
        return _core.clock_ns() - start


def _layout_in_c(options: EngineOptions, sizes: tuple[int, int] = (0, 0)) -> dict[str, Any]:
    """The same for the engine in C: what decides where gradients lie. sizes: where not 0 they take the place of the options'."""
    cap = sizes[0] or options.bucket_bytes
    first = sizes[1] or min(options.bucket_bytes, FIRST_BUCKET_BYTES)
    wire = WIRES.get(options.compression.name, torch.float32) if options.compression is not None else torch.float32
    layout = {"bucket_bytes": cap, "first_bucket_bytes": first, "wire": DTYPES[wire]}
    return {**layout, "bucket_elements": options.bucket_elements, "static_graph": _is_marked(options)}


def _is_marked(options: EngineOptions) -> bool:
    """Whether sums can say by themselves that some gradient was not finite."""
    return options.static_graph and not options.encodes and not options.unsummed


def _in_c(options: EngineOptions, sizes: tuple[int, int]) -> dict[str, Any]:
    """And all of them."""
    whole: dict[str, Any] = dict(_layout_in_c(options, sizes))
    whole["unsummed"] = options.unsummed
    if options.compression is not None and options.encodes:
        whole["encoding"] = ENCODINGS[options.compression.name]
        whole["way"] = WAYS[options.way]
        whole["ratio"] = options.compression.number
        whole["seed"] = options.seed
    return whole
