"""When this rank's step began, and what of it went to waiting for others, and to what is no part of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from evenstep import _core
from evenstep.cpu_quota import Bound, CpuQuota


class Mark(NamedTuple):
    at: int
    blocked: int  # until then, and …
    used: int  # … of the CPU; all in ns


class _Apart(NamedTuple):
    """Sums, in ns."""

    idle: int = 0  # beside what was blocked
    lasted: int = 0
    blocked: int = 0
    used: int = 0  # of the CPU


class StepTimes:
    """Of the step under way. Its work reaches from the end of the last backward before the step before, to that of the last
    one before its own. waited: ns in groups that count their waits themselves. quota: of the CPU, None: none that counts."""

    def __init__(self, telemetry: _core.Telemetry, waited: Callable[[], int], quota: CpuQuota | None = None) -> None:
        self._telemetry, self._waited, self._quota = telemetry, waited, quota
        now = _core.clock_ns()
        self._reference = now  # where its work began
        self._blocked_reference = self._blocked_at_sync = 0
        self._exposed = 0  # ns blocked in engines' finish and in groups that do not count their waits
        self._own = 0  # ns of it that this rank needed for the exchange by itself, in the step under way
        self._own_last = 0  # the same since the last meeting; the next one may still undo it
        self.meetings = 0  # of all ranks, since the beginning
        self.own_seconds = 0.0  # the same of the step before, for each of its batches
        self._apart = _Apart()  # evaluation and checkpoints
        self._apart_reference = self._apart_at_sync = self._apart
        self._voted: tuple[int, int] | None = None  # when all ranks were at the exchange under way; CPU time then
        self._exchanges: list[tuple[int, int]] = []  # the last one of the step before, all of this one: ns; CPU time
        self.seen = 0  # of the pass that was asked for last, by the clock alone
        self.waited = 0  # ns of it beside, for others within the step, before it was done
        self._blocked_at_step = 0  # from when on what is blocked is such a wait …
        self._apart_at_step = 0  # … and how much of evaluation and checkpoints was
        self._blocked_at_vote = 0
        self._exchanged = 0  # ns blocked in votes and exchanges of gradients since then
        self._sync_end = now
        self._used_reference = self._used_at_sync = self._used_ns()  # CPU time
        self._last_end = self._end_at_sync = now  # of the last backward before the step's work
        self._step_end = now
        self._paused: Mark | None = Mark(now, 0, self._used_reference)  # since when nothing is trained
        self._batch_start = now
        self._backward_start = now

    def blocked_ns(self) -> int:
        """Since the beginning."""
        return self._exposed + self._waited()

    def blocks(self, ns: int) -> None:
        """So long, where nobody else counts it."""
        self._exposed += ns

    def works_alone(self, ns: int) -> None:
        """So long of what was blocked last, since it met the others: they do not wait for it, but it comes later to the next
        meeting, as by its optimizer's step."""
        self._own_last = ns

    def meets(self) -> None:
        """The other ranks: what was done alone before lies between two meetings, and no smaller share makes up for it."""
        self._own_last = 0
        self.meetings += 1

    def mark(self) -> Mark:
        """Of now, for apart_since."""
        return Mark(_core.clock_ns(), self.blocked_ns(), self._used_ns())

    def apart_since(self, since: Mark) -> int:
        """What came since then is no part of a step. How long it was, in ns."""
        now = self.mark()
        lasted, blocked = now.at - since.at, now.blocked - since.blocked
        before = self._apart
        self._apart = _Apart(
            before.idle + max(0, lasted - blocked),
            before.lasted + lasted,
            before.blocked + blocked,
            before.used + now.used - since.used,
        )
        return lasted

    def pause(self) -> None:
        self._paused = self.mark()

    def unpause(self) -> bool:
        """Whether there was a pause."""
        if self._paused is None:
            return False
        since = self._paused
        self._paused = None
        now = since.at + self.apart_since(since)
        if self._step_end == since.at:  # nothing was trained yet: the first step begins here
            self._step_end = now
        return True

    def batch_arrives(self, step: int, asked_ns: int) -> None:
        self._batch_start = _core.clock_ns()
        self._telemetry.span(_core.SPAN_DATA, step, asked_ns, self._batch_start - asked_ns)

    def backward_begins(self, step: int, forward: bool) -> None:
        """forward: a batch of a prepared loader was in it."""
        self._own, self._own_last = self._own + self._own_last, 0
        self._backward_start = _core.clock_ns()
        if forward:
            self._telemetry.span(_core.SPAN_FORWARD, step, self._batch_start, self._backward_start - self._batch_start)

    def backward_ends(self, step: int) -> int:
        """When, in ns."""
        end = self._batch_start = _core.clock_ns()
        self._telemetry.span(_core.SPAN_BACKWARD, step, self._backward_start, end - self._backward_start)
        return end

    def busy_until(self, end_ns: int) -> int:
        """This rank's own work in the step so far."""
        apart, before = self._apart, self._apart_reference
        blocked = self.blocked_ns() - self._blocked_reference
        self.seen = seen = max(0, end_ns - self._reference - blocked - (apart.idle - before.idle))
        self._waits()
        if self._quota is None:
            return seen
        # what was waited for others may have been polled, and is no work
        polled = blocked - (apart.blocked - before.blocked)
        used = max(0, self._used_ns() - self._used_reference - (apart.used - before.used) - polled)
        if used <= seen * self._quota.bound.cores:
            return seen
        return max(seen, self._lasts(used, self._quota.look(), end_ns))  # another one, perhaps, than it was

    def _waits(self) -> None:
        """What this rank has waited within the step: where the others have samples of theirs in its statistics, or the script
        calls a collective of its own. Not from the last exchange to the optimizer's step, in which all meet to commit it."""
        self._blocked_at_vote = self.blocked_ns()
        blocked = self._blocked_at_vote - self._blocked_at_step - self._exchanged
        self.waited = max(0, blocked - (self._apart.blocked - self._apart_at_step))

    def _step_begins(self) -> None:
        """From now on, what is waited is waited within it."""
        self._blocked_at_step, self._apart_at_step, self._exchanged = self.blocked_ns(), self._apart.blocked, 0

    def _used_ns(self) -> int:
        return self._quota.used_ns() if self._quota is not None else 0

    def _lasts(self, used: int, bound: Bound, end_ns: int) -> int:
        """By its quota, so much CPU time: no wait for others makes it less in the long run, however fast the rank goes on after
        one. Only an exchange does, which no split makes shorter: what the quota gives while it lasts, a period's at most, comes
        on top. It has not lasted longer than the step did beside exchanges, whatever the quota is by now."""
        if not bound.cores > 0:
            return 0
        given = sum(max(0, min(ns, bound.period_ns) - int(cpu / bound.cores)) for ns, cpu in self._exchanges)
        whole = end_ns - self._last_end - sum(ns for ns, _ in self._exchanges)
        return min(int(used / bound.cores) - given, whole - (self._apart.lasted - self._apart_reference.lasted))

    def meets_to_exchange(self) -> None:
        """All ranks have ended their backward: what is waited for until synchronised is the exchange itself."""
        self._voted = _core.clock_ns(), self._used_ns()

    def synchronised(self, step: int, end_ns: int) -> None:
        """The gradients of the backward that ended then are whole."""
        self._sync_end, self._used_at_sync, self._end_at_sync = _core.clock_ns(), self._used_ns(), end_ns
        self._blocked_at_sync, self._apart_at_sync = self.blocked_ns(), self._apart
        self._exchanged += self._blocked_at_sync - self._blocked_at_vote
        since, used = self._voted or (self._sync_end, self._used_at_sync)
        self._exchanges.append((self._sync_end - since, self._used_at_sync - used))
        self._voted = None
        self._telemetry.span(_core.SPAN_WAIT, step, end_ns, self._sync_end - end_ns)

    def committed(self, batches: int) -> None:
        """All meetings of the step are over."""
        self.own_seconds = (self._own + self._own_last) / 1e9 / max(1, batches)
        self._own = self._own_last = 0
        self._reference, self._used_reference = self._sync_end, self._used_at_sync
        self._last_end = self._end_at_sync
        del self._exchanges[:-1]
        self._blocked_reference, self._apart_reference = self._blocked_at_sync, self._apart_at_sync
        self._step_begins()

    def begin_anew(self) -> None:
        """The step begins now."""
        self._own = self._own_last = 0
        self._reference = self._sync_end = self._last_end = self._end_at_sync = _core.clock_ns()
        self._used_reference = self._used_at_sync = self._used_ns()
        self._blocked_reference = self._blocked_at_sync = self.blocked_ns()
        self._apart_reference = self._apart_at_sync = self._apart
        self._exchanges, self._voted = [], None
        self._step_begins()

    def stepped(self, step: int) -> tuple[int, int]:
        """The optimizer has made it: when, and how long it was since the one before."""
        now = _core.clock_ns()
        self._telemetry.span(_core.SPAN_OPTIMIZER, step, self._sync_end, now - self._sync_end)
        duration, self._step_end = now - self._step_end, now
        self._step_begins()
        return now, duration

    @property
    def seconds(self) -> float:
        """Since the end of the step before."""
        return (_core.clock_ns() - self._step_end) / 1e9
