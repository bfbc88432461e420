"""Where a script is in the data of a prepared loader: its iterations, the cursor of a checkpoint, and what comes again after a
rank was lost."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from evenstep import _core
from evenstep._core import EvenstepError
from evenstep.apart import Apart
from evenstep.batch_adapting import not_adapted
from evenstep.course_parts import Part, no_batch
from evenstep.iterations import LOOKED, TRAINED, Iterations, epoch_done
from evenstep.loops import Place, Position
from evenstep.measured_place import speeds_of, take_speeds
from evenstep.order import chained

if TYPE_CHECKING:
    from evenstep.batch_adapting import BatchAdapting
    from evenstep.feeds import BatchPlan, IndexFeed
    from evenstep.session import Session
    from evenstep.shares import Shares
    from evenstep.stream_feed import StreamFeed
    from evenstep.worker_sizing import WorkerSizing


class DataCourse:
    """What an EvenLoader is as to the script's loops over it."""

    loader: DataLoader[Any]
    train: bool
    _feed: StreamFeed | IndexFeed
    _shares: Shares | None
    _sizing: WorkerSizing | None  # while it looks at loading

    def __init__(self, session: Session, seed: int) -> None:
        self.seed = seed
        self._session = session
        self.chosen: tuple[int, int] | None = None  # by _sizing: workers, and batches that each is given ahead
        self.fetched = 0  # batches since the last optimizer step
        self.fetching_seconds = 0.0  # of all batches, in whichever process
        self.adapting: BatchAdapting | None = None  # where the batch size follows the gradients' noise
        self._next_epoch = 0  # of the next iteration
        self._epoch_set = False
        self._iterations = Iterations()
        self._last_place = Place()  # in es.epochs' loops, at the last iteration's begin
        self._before = 0  # iterations before the first one in that place
        self._iterated = False  # in this script
        self._moved = False  # to a checkpoint's cursor, in the middle of an iteration
        self._undecided: dict[str, Any] | None = None  # a checkpoint's state, loaded in an iteration before any step
        self._onward = False  # the cursor was loaded between two iterations: where its epoch is done, the next begins
        self._turn = 0  # of the iteration under way; one that is closed later than the next begins counts no more
        self._epoch = 0  # the cursor: batches of this epoch that the user has had
        self._stepped = False  # of a checkpoint's cursor: a step had used some of them
        self._batch = 0
        self._samples = 0
        self._came = 0  # batches in the training, of all epochs: the number of the next one
        self._drawn = 0  # checksum of the batches that make the cursor
        self._expected: int | None = None  # the checkpoint's
        self._sampler_state = ""  # at the beginning of the epoch under way
        self._saved_sampler: str | None = None  # the checkpoint's, until its epoch begins
        self._iterating = self._resized = False
        self._pass = 0  # the number of the last one with batches of this loader
        self._parts: list[Part] = []  # of that
        self._to_come: list[Part] = []  # of a void one: they come again
        self._ended_apart: Apart | None = None  # the last one
        self._again = False  # in the iteration under way, when the next batch is asked for
        self._replaced = False  # that one, before: the script has begun another while it held its iterator
        self._here: Any = None  # of a stream, before the batch that was given last
        self._shared_anew = False  # among fewer ranks: the epoch under way is opened once more where it is
        self._left: tuple[int, int, int] | None = None  # the cursor where an iteration was left before its end

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch."""
        self._next_epoch, self._epoch_set = epoch, True

    @property
    def epoch(self) -> int:
        """The epoch under way, or the next one between two."""
        return self._epoch

    @property
    def samples_drawn(self) -> int:
        """Of all ranks, in the training so far."""
        return self._samples

    # -- the cursor --

    def state_dict(self) -> dict[str, Any]:
        """Where training stands: plain JSON."""
        if self._undecided is not None:
            return dict(self._undecided)
        here = self._session.loops.place().position == self._last_place.position
        return {
            "iterations": self._iterations.state(),
            "place": self._session.loops.state(),
            "within": self._iterations.before - self._before if here else 0,  # iterations in that place
            "epoch": self._epoch,
            "batch": self._batch,
            "stepped": self._cursor_stepped(),
            "seed": self.seed,
            "samples": self._samples,
            "drawn": self._drawn,
            "sampler": self._state_of_sampler(),
            "batch_size": self._feed.batch_size,
            **self._position(),
            **({} if self.adapting is None else {"adapt": self.adapting.state(self._batch > 0)}),
            **({"came": self._came} if self._shares is not None and self._shares.scheduled else {}),
            "scheduler_calls": self._session.scheduler_steps.total(),
            "speeds": speeds_of(self._session, self._shares),
        }

    def _cursor_stepped(self) -> bool:
        """Whether a step has used some of the cursor's batches: else the iteration is a look so far."""
        return self._iterations.stepped if self._iterating and not self._moved else self._batch > 0 and self._stepped

    def _state_of_sampler(self) -> str:
        """With which the cursor's epoch begins."""
        if self._saved_sampler is not None:
            return self._saved_sampler
        return self._sampler_state if self._iterating else self._feed.state()

    def _position(self) -> dict[str, Any]:
        """What a stream needs beside the number of its batches."""
        position = self._feed.position() if self._batch else None
        return {} if position is None else {"stream": position}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises where the cursor is none of this loader's; changes nothing."""
        size, adapted = state.get("batch_size"), state.get("adapt")
        if adapted is not None and self.adapting is not None:
            self.adapting.check(adapted)
        elif adapted is not None:
            not_adapted(adapted, state["batch"] > 0, self._feed.batch_size, self._session.rank == 0)
        elif size != self._feed.batch_size and state["batch"]:
            raise EvenstepError(
                f"the checkpoint's data position counts batches of {size} samples, but this loader's global batch has "
                f"{self._feed.batch_size}\n  fix: resume with the batch size of the checkpoint"
            )
        if state["batch"]:
            self._feed.check_position(state.get("stream"))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a cursor. At the script's beginning: iterations of epochs before it yield nothing, its own begins at
        its batch. Once a loop has trained: the next batch is the cursor's, whatever the iteration."""
        self.check_state_dict(state)
        self._forget_pass()
        if self.adapting is not None and "adapt" in state:
            self.adapting.load(state["adapt"], int(state["batch"]))
        self.seed = int(state["seed"])
        self._epoch, self._batch = int(state["epoch"]), int(state["batch"])
        self._stepped = self._batch > 0 and bool(state.get("stepped", True))
        self._samples = int(state["samples"])
        self._came = int(state.get("came", 0))
        self._expected = state.get("drawn")
        self._drawn = self._expected or 0
        self._saved_sampler = state.get("sampler", "")
        self._feed.load_position(state.get("stream"))
        self._next_epoch = 0
        loops = self._session.loops
        self._undecided = None
        if not loops.trained and not loops.iterating:
            self._begin_with(state)
            return
        self._moved = self._iterating
        if not loops.trained:
            self._undecided = state
        elif not self._moved:
            self._next_is_the_cursor()

    def _begin_with(self, state: dict[str, Any]) -> None:
        """The script is at its beginning: what was done before the cursor is passed over."""
        self._iterations.load(state.get("iterations", [[0, self._epoch, TRAINED]]), self._epoch)
        self._last_place = self._session.loops.load(state.get("place", {}))
        self._before = self._iterations.before - state.get("within", 0)
        take_speeds(self._session, self._shares, state.get("speeds", {}))
        self._session.scheduler_steps.replay(state.get("scheduler_calls", {}))

    def _next_is_the_cursor(self) -> None:
        """After a cursor was loaded between two iterations of a script that has trained: what came before stays."""
        self._moved, self._onward = False, True
        self._iterations.go_to(self._epoch)

    def settle(self, beginning: bool) -> None:
        """Of a checkpoint that was loaded in an iteration before any step, see Loops.settle."""
        state, self._undecided = self._undecided, None
        if state is None:
            return
        if beginning:
            self._leave()
            self._begin_with(state)
        elif not self._iterating:
            self._next_is_the_cursor()

    def _leave(self) -> None:
        """The iteration under way, whose iterator is still referenced, is over: another begins."""
        self._turn += 1
        self._moved = self._iterating = False
        self._iterations.end()
        self._session.latest = self._session.trains_on = None

    # -- for es.epochs --

    @property
    def trained(self) -> bool:
        """Whether this script has made a step with it."""
        return self._iterations.trained

    @property
    def last_position(self) -> Position | None:
        """Of its last iteration in this script."""
        return self._last_place.position if self._iterated else None

    @property
    def resuming(self) -> bool:
        """Whether the script has not come to the checkpoint's cursor."""
        return self._iterations.resuming

    @property
    def replaying(self) -> bool:
        """The same, once it has come by an iteration of before the checkpoint."""
        return self._iterations.replaying

    def skip_to_cursor(self) -> int:
        """The script's loop may start with the epoch under way: its number; 0 where the script has come by those
        before it."""
        if self._iterations.replayed:
            return 0
        self._iterations.skip()
        return self._epoch

    def skip_to_position(self) -> None:
        """The script's loop starts with the checkpoint's epoch of it: the iterations that it had there are left."""
        self._iterations.skip(self._iterations.before - self._before)

    def skip_loop(self, tag: int) -> None:
        """The script's loop was over."""
        self._iterations.skip_to(tag)

    # -- iterating --

    @property
    def iterating(self) -> bool:
        return self._iterating

    def begin(self) -> Iterator[Any]:
        """The iteration whose first batch is asked for."""
        loops = self._session.loops
        if self._undecided is not None:
            loops.settle(beginning=True)
        if self._moved:
            self._leave()
            self._next_is_the_cursor()
        self._session.iteration_begins()
        if self._to_come:
            return self._iterate_again()
        kind, jump, skip = "", False, 0
        if self._iterations.resuming:
            kind, epoch = self._iterations.next()
            jump = kind == "jump"
            if self._epoch_set:  # the script says where it is
                kind = "cursor" if self._next_epoch >= self._epoch else kind
            if kind == TRAINED:
                self._next_epoch, self._epoch_set = epoch + 1, False
                self._session.replayed = True
                raise epoch_done(epoch)
            if kind == LOOKED:
                self._next_epoch, self._epoch_set = epoch + 1, False
                return self._batches_apart(epoch, self._session.trains_on)
            if not self._epoch_set or self._next_epoch == self._epoch:
                self._next_epoch, skip = self._epoch, self._batch
            self._iterations.reached()
            loops.reached()
            self._put_sampler_back()
        if jump:
            self._session.scheduler_steps.go_on()
        loaded, self._onward, self._epoch_set = self._onward, False, False
        return self._iterate(skip, onward=jump or loaded, one=loaded)

    # -- what comes again --

    def mark(self, number: int) -> None:
        """A batch comes, of the pass of this number."""
        if number != self._pass:
            self._pass, self._parts = number, []
        last = self._parts[-1] if self._parts else None
        if last is None or (last.turn, last.epoch) != (self._turn, self._epoch):
            self._parts.append(
                Part(
                    self._turn,
                    self._last_place,
                    self._before,
                    self._iterations.kept(),
                    self._epoch,
                    self._batch,
                    self._drawn,
                    self._samples,
                    self._came,
                    self._cursor_stepped(),
                    self._sampler_state,
                    self._here,
                    self._session.steps.begun_backwards,
                    [] if self.adapting is None else self.adapting.sizes,
                )
            )
        self._parts[-1].count += 1

    def forget_look(self) -> None:
        """Before another batch comes, of whichever loader: those of an iteration that is over, and that no backward was made
        with, were only looked at."""
        last = self._parts[-1] if self._parts else None
        if last is None or last.backwards != self._session.steps.begun_backwards:
            return
        if not self._iterating or last.turn != self._turn:
            self._parts.pop()
            self._session.pass_order.drop(self, last.count)

    def take_back(self, number: int) -> None:
        """What came in the pass of this number comes again, shared out anew: when the next batch is asked for, or, where the
        iteration is over, in the next one."""
        if number != self._pass or not self._parts:
            return
        self._to_come, self._parts = [*self._parts, *self._to_come], []
        self._again = self._iterating
        self._go_back_to(self._to_come[0])

    def _go_back_to(self, part: Part) -> None:
        self._epoch, self._batch, self._drawn, self._samples = part.epoch, part.batch, part.drawn, part.samples
        self._came = part.came
        self._last_place, self._before, self._stepped = part.place, part.before, part.stepped
        self._iterations.put_back(part.iterations)
        self._sampler_state = part.sampler
        if self.adapting is not None:
            self.adapting.go_back(part.epoch, part.batch, part.sizes)
        self._feed.load_state(part.sampler)
        self._feed.go_to(part.position)
        self._next_epoch, self._epoch_set, self._left = part.epoch + 1, False, None
        self.fetched = 0
        self._resized = True

    def _forget_pass(self) -> None:
        """What it had is not to come again."""
        if self._to_come or self._parts:
            self._session.pass_order.forget(self)
        self._parts, self._to_come, self._again, self._replaced = [], [], False, False

    @property
    def waits_in(self) -> Place | None:
        """The place in es.epochs' loops of the first iteration that comes again, as soon as there is another; None: there is
        nothing."""
        return self._to_come[0].place if self._to_come and not self._iterating else None

    def _goes_back(self) -> bool:
        if self._again:
            self._session.pass_comes_again()
            return True
        if self._shared_anew:
            self._shared_anew = False
            self._resized = True
            self._feed.load_state(self._sampler_state)
            return True
        return False

    def _next_part(self) -> tuple[int, int, int | None]:
        """Its epoch, after how many of its batches it begins, and how many there are; None: the rest of the epoch."""
        part = self._to_come.pop(0)
        self._go_back_to(part)
        self._again = self._shared_anew = self._replaced = False
        return part.epoch, part.batch, part.count if self._to_come else None

    def _iterate_again(self) -> Iterator[Any]:
        """An iteration that was over before the step on its batches, which was lost."""
        session = self._session
        session.pass_comes_again()
        rest, self._to_come = self._to_come[1:], self._to_come[:1]
        epoch, start, _ = self._next_part()
        self._to_come = rest
        self._iterating = True
        self._turn += 1
        session.steps.unpause(self)
        yield from self._give(epoch, start)

    def _batches_apart(self, epoch: int, made_at: BatchPlan | None) -> Iterator[Any]:
        """An epoch's batches that train nothing: evaluation, maybe between two training batches, or what the script
        looked at before it trained, once more."""
        session, had, total = self._session, 0, 0
        mine = Apart(session, made_at, self._ended_apart)
        begun = None if self.train else session.counted_share.begins()
        try:
            for plan, batch in self._feed.open(epoch, apart=True):
                mine.gives(plan)
                had += plan.samples
                total += plan.total
                yield batch
            session.counted_share.ends(begun, (had, total), self.train)
        finally:
            mine.ends()
            self._ended_apart = mine
            session.steps.ended_samples = had

    def _iterate(self, skip: int, onward: bool, one: bool = False) -> Iterator[Any]:
        """onward: where the epoch has no batch left, with the next; one: both are then one iteration of the script."""
        session = self._session
        epoch = self._next_epoch
        self._next_epoch += 1
        if self.has_length and len(self._feed) == 0:
            raise self._no_batch()
        self._epoch, self._batch, self.fetched = epoch, skip, 0
        self._drawn = self._drawn if skip else 0
        if self.adapting is not None:
            self.adapting.epoch_begins(epoch, skip)
        self._sampler_state = self._feed.state()
        place = session.loops.now
        if place.position != self._last_place.position:
            self._before = self._iterations.before
        self._last_place = place
        self._iterations.begin(epoch, place.tag, stepped=skip > 0 and self._stepped)
        self._iterated = True
        session.epoch_begins(self, epoch)
        self._iterating = True
        self._turn += 1
        session.steps.unpause(self)
        found, skip = yield from self._give(epoch, skip)
        if onward and not found:
            if one:
                self._iterations.take_back()
            yield from self._iterate(0, onward=False)
        elif not found and skip == 0 and self._iterations.first:
            raise self._no_batch()

    def _give(self, epoch: int, skip: int) -> Generator[Any, None, tuple[bool, int]]:
        """The iteration under way, from this batch on. Whether there was one, and the batch: a load moves it."""
        session, turn = self._session, self._turn
        ended, start, most, begun = False, skip, None, skip
        plays_parts = False  # all that came in a pass, of several iterations, comes again in this one
        try:
            while True:
                before = self._batch
                yield from self._one_epoch(epoch, start, most)
                if self._moved:
                    epoch, skip = self._arrive()
                    start, most = skip, None
                elif self._again or (plays_parts and self._to_come):
                    plays_parts = True
                    epoch, skip, most = self._next_part()
                    start = skip
                elif self._resized:
                    start = self._batch
                elif session.planning:
                    if self._batch == before:  # a loader that has its batches once
                        raise self._no_batch()
                    start = skip = 0  # the plan's measuring steps go on in the same epoch
                else:
                    break
            ended = True
        finally:
            found = self._batch > skip
            if turn == self._turn:
                self._end(epoch, ended, begun)
        return found, skip

    def replaced(self) -> None:
        """The script asks for another iterator while it holds the one under way."""
        self._replaced = self._again

    def _end(self, epoch: int, ended: bool, begun: int) -> None:
        """begun: after how many batches of the epoch."""
        session = self._session
        again = (
            self._replaced and self._again and self._to_come[-1].turn == self._turn and self._to_come[-1].batch == begun
        )
        if self._again and not again:  # left after a void step in it, without asking for its batches again
            self._forget_pass()
        self._again = self._replaced = False
        self._left = None if ended or self._moved else (epoch, self._batch, self._drawn)
        self._iterating = False
        self._iterations.end()
        if self._undecided is not None:
            session.loops.settle(beginning=True)  # it was a look
        elif self._moved:
            self._next_is_the_cursor()
        else:
            self._epoch, self._batch = epoch + 1, 0  # also after a break: the next iteration is of the next epoch
            self._drawn = 0
        session.latest = session.trains_on = None
        session.steps.pause(self)
        if again:  # an iterator for each batch, which the script held until the next: as where it does not
            self._go_back_to(self._to_come[0])

    def _no_batch(self) -> EvenstepError:
        return no_batch(self.loader, self._feed.batch_size)

    def reopen(self) -> None:
        """At the script's end: an iteration that was left is under way. A `break` cannot be told from an exit in the
        middle of an epoch, whose other samples must not be lost."""
        loops = self._session.loops
        if self._left is not None and not self._iterating and self._last_place.number == loops.now.number:
            self._epoch, self._batch, self._drawn = self._left
            self._iterating = True
            self._iterations.reopen()
            loops.back_to(self._last_place)

    def _arrive(self) -> tuple[int, int]:
        """The iteration under way goes on at a cursor that was loaded: in this epoch, after so many batches."""
        self._session.loops.settle(beginning=False)
        self._moved = False
        self._put_sampler_back()
        self._sampler_state = self._feed.state()
        self._iterations.moved(self._epoch, self._stepped)
        self._next_epoch = self._epoch + 1
        return self._epoch, self._batch

    def _put_sampler_back(self) -> None:
        self._feed.load_state(self._saved_sampler or "")
        self._saved_sampler = None

    def committed(self, mine: bool) -> None:
        """An optimizer step was made; mine: with a batch of this loader."""
        self._iterations.committed(mine)

    def _one_epoch(self, epoch: int, skip: int, most: int | None) -> Iterator[Any]:
        """most: no more than so many batches."""
        session = self._session
        session.arrive()
        start = _core.clock_ns()
        session.steps.phases.enter("data")
        # draws a seed for its workers: before the generators are put back
        batches = self._feed.open(epoch, skip, self._drawn if self._resized else self._expected)
        self._resized = self._shared_anew = False
        session.first_fetch()
        if self._sizing is not None:
            self._sizing.open()
            self._sizing.ask()
        last = None if most is None else skip + most
        self._here = self._feed.here()
        for plan, batch in batches:
            if self._sizing is not None:
                self._sizing.arrive()
            session.batch_arrives(plan, start, batch)
            self.fetched += 1
            self._batch += 1
            self._drawn = chained(self._drawn, plan.checksum)
            self._samples += plan.total
            self._came += 1
            yield batch
            if self.adapting is not None and self.adapting.between(epoch, self._batch):
                self._shared_anew = True
            session.boundary()
            if self._moved or self._goes_back() or self._resize() or self._batch == last:
                return
            self._here = self._feed.here()
            start = _core.clock_ns()
            session.steps.phases.enter("data")
            if self._sizing is not None:
                self._sizing.ask()

    def expected_batches(self, epochs: int) -> int:
        """Of so many epochs, those that were had included."""
        return (
            epochs * len(self._feed)
            if self.adapting is None
            else self.adapting.expected(epochs, self._epoch, self._batch)
        )

    def _resize(self) -> bool:
        """Whether the epoch is to go on with other workers, which were chosen now."""
        session = self._session
        if self._sizing is None:
            return False
        try:
            chosen = self._sizing.step(session.step, session.steps.blocked_ns)
        except EvenstepError as error:
            if session.recovery is None or not session.recovery.mends(error):
                raise
            return self._goes_back()  # shared out anew, with the workers that there are
        reopens = self._sizing.reopens
        if self._sizing.decided:
            self._sizing = None
        if chosen is None:
            return False
        self.chosen = chosen[session.rank] if chosen else None
        self._feed.resize(*(self.chosen or (0, 0)))  # also where this rank's are as they were: all begin anew
        self._resized = reopens
        if self._resized:
            self._feed.load_state(self._sampler_state)
        return self._resized

    @property
    def has_length(self) -> bool:
        try:
            len(self._feed)
        except TypeError:
            return False
        return True
