"""EvenLoader: a user's DataLoader of which each rank gets its share of every global batch."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from evenstep import _core
from evenstep.counted_share import Begun
from evenstep.data_course import DataCourse
from evenstep.feeds import BatchPlan, IndexFeed, check_loader
from evenstep.group import gather_objects
from evenstep.kept_memory import kept_memory
from evenstep.loading_ahead import Lead
from evenstep.share_samples import FetchAs
from evenstep.shares import Shares, equal_shares
from evenstep.stream_feed import StreamFeed
from evenstep.worker_sizing import WorkerSizing, why_not_in_workers

if TYPE_CHECKING:
    from evenstep.session import Session

__all__ = ["BatchPlan", "EvenLoader", "check_loader"]


class EvenLoader(DataCourse):
    """Iterates over this rank's share of the global batches of `loader`.

    Its length counts global batches and is the same on every rank. With train=False the split serves evaluation:
    without padding or repeats, small batches joined so that every rank has a sample of each; where there are fewer
    samples than ranks, those without get a dummy one, as in training.
    Attributes it does not have are those of the user's loader.
    """

    def __init__(
        self,
        session: Session,
        loader: DataLoader[Any],
        *,
        train: bool,
        shares: Shares | None,
        seed: int,
        skip_unreadable: bool = False,
        number: int | None = None,
    ) -> None:
        """number: of the loader, by which its samples have random numbers of their own (sample_random); None: they have those of
        the process that fetches them."""
        check_loader(loader)
        super().__init__(session, seed)
        self.loader = loader
        self.train = train
        self.number = number
        self._shares = shares
        self.fetch_as: FetchAs | None = None
        self._feed: StreamFeed | IndexFeed = (
            StreamFeed(self, loader)
            if isinstance(loader.dataset, IterableDataset)
            else IndexFeed(self, loader, skip_unreadable)
        )
        self._sizing: WorkerSizing | None = None
        self._evaluated = self._evaluations = self._last_evaluation = 0
        self._per_step = 1  # batches of the last optimizer step that had any

    # -- what a DataLoader has --

    def __len__(self) -> int:
        return len(self._feed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def batch_size(self) -> int | None:
        """Samples of a global batch."""
        return self._feed.batch_size

    # -- iterating --

    def __iter__(self) -> Iterator[Any]:
        if not self.train:
            return self._iterate_evaluation(self._session.trains_on)
        self.replaced()
        return _Iteration(self)

    def share_out(self, total: int, ahead: int) -> tuple[list[int], float]:
        """Shares of a batch drawn now, with `ahead` drawn before it and not fetched, and the seconds that its step is
        predicted to take."""
        if self._shares is None:
            return equal_shares(total, self._session.world_size), float("nan")
        if not self.train:
            return self._session.shares_for_evaluation(self._shares).split(total), float("nan")
        alone = self._session.dummy_samples == 1
        shares = self._shares.draw(total, alone=alone, step=self._expected_step(ahead), number=self._came + ahead)
        news = self._shares.take_news()
        if news:
            self._tell(news)
        return shares, self._shares.predict(shares)

    def _expected_step(self, ahead: int) -> int:
        """The optimizer step that will use a batch drawn now, with `ahead` drawn before it and not fetched."""
        return self._session.step + (min(self.fetched, self._per_step - 1) + ahead) // self._per_step

    def steps_until(self, ahead: int) -> int:
        """From now to the step that will use the batch after `ahead` that were not fetched."""
        return self._expected_step(ahead) - self._session.step

    @property
    def lead(self) -> Lead:
        """How many steps ahead shares are decided where workers load."""
        return self._feed.lead

    def stepped(self) -> None:
        """An optimizer step has used what was fetched."""
        if self.fetched:
            self._per_step, self.fetched = self.fetched, 0

    def shrink(self, shares: Shares | None, chosen: tuple[int, int] | None = None) -> None:
        """Goes on among the ranks that are left. chosen: workers and batches ahead of each, of a rank that es.prepare's "auto" has
        given some: then who joins has as many batches drawn ahead."""
        self._shares, self._sizing = shares, None
        self._per_step = 1  # who joins has made no step
        if chosen is not None and self.chosen is None:
            self.chosen = chosen
            self._feed.resize(*chosen)
        self.lead.begin_anew()
        self._shared_anew = self._iterating

    @property
    def batches_per_step(self) -> int:
        """In the last optimizer step that had any."""
        return self._per_step

    def _iterate_evaluation(self, made_at: BatchPlan | None) -> Iterator[Any]:
        """made_at: the training's batch then. By what all ranks know alike, also one that joined or was resumed, whose own loaders were gone through less often: the
        training's seed, its step, and how many iterations came at it."""
        if self.loader.generator is None:
            self.seed = next((one.seed for one in self._session.loaders.values() if one.train), self.seed)
        step = self._session.step
        if self._evaluated != step:
            self._evaluated, self._evaluations = step, 0
        epoch = self._next_epoch if self._epoch_set else step + (self._evaluations << 32)
        self._epoch_set = False
        self._evaluations += 1
        self._last_evaluation, self._session.evaluated = epoch, self
        yield from self._batches_apart(epoch, made_at)

    def evaluate_again(self) -> None:
        """The next iteration is the last one again, which a rank that is lost has ended on some of the others."""
        self._evaluations -= 1
        self.set_epoch(self._last_evaluation)

    def first_batch_size(self) -> int:
        """Samples of a global batch; where a batch sampler does not say, of the first, with which training begins."""
        return self._feed.first_batch_size()

    def size_workers(self, asked: bool) -> None:
        """By what loading takes of the first steps, where the script set no number. Not asked: rank 0 says what would help."""
        session = self._session
        can = self.loader.num_workers == 0 and not session.planning
        if can and (asked or session.rank == 0):
            feed, gather = self._feed, self._gather if asked else None
            why_not = partial(why_not_in_workers, self.loader)
            self._sizing = WorkerSizing(
                session.rank,
                gather,
                why_not,
                self._tell,
                lambda: feed.reopens,
                feed.most_workers,
                lambda: self.fetching_seconds,
            )

    @property
    def sizing_workers(self) -> bool:
        """Whether other workers are likely to come in the middle of an epoch, on all ranks."""
        return self._sizing is not None and self._sizing.may_change

    def _tell(self, words: str) -> None:
        session = self._session
        if session.rank == 0:
            session.telemetry.event(_core.EVENT_MESSAGE, session.step, 0, words)
            sys.stderr.write(f"evenstep: {words}\n")

    def _gather(self, value: Any) -> list[Any]:
        with self._session.steps.blocking():
            return gather_objects(self._session.group, value)

    def set_shares(self, shares: Shares | None) -> None:
        """From the next batch on a schedule of shares; None: what the balancer gives."""
        self._shares = shares

    @property
    def feed(self) -> StreamFeed | IndexFeed:
        """What draws the batches, and fetches this rank's samples of them."""
        return self._feed

    @property
    def prepared_in(self) -> Session:
        """The session of the `es.prepare` that it came from."""
        return self._session

    @property
    def unwrapped(self) -> bool:
        """Whether a DistributedSampler was taken away."""
        return self._feed.unwrapped

    @property
    def shares(self) -> Shares | None:
        """The schedule of shares that it was given, if any."""
        return self._shares


class _Iteration:
    """One iteration over a training loader, from the first batch that is asked for."""

    def __init__(self, loader: EvenLoader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._begun_at = self._samples_before = 0
        self._begun: Begun | None = None

    def __iter__(self) -> _Iteration:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(())  # of what was done before the checkpoint
            self._batches = self._loader.begin()
            session = self._loader.prepared_in
            self._begun_at, self._samples_before = session.step, self._loader.samples_drawn
            session.unexchanged.begins()
            self._begun = session.counted_share.begins()
        try:
            return next(self._batches)
        except StopIteration:
            session = self._loader.prepared_in
            session.unexchanged.ends()
            total = self._loader.samples_drawn - self._samples_before
            session.counted_share.ends(self._begun, (session.steps.loop_samples or 0, total), train=True)
            if session.step > self._begun_at:  # not where a script evaluates by it
                kept_memory.give_back()  # to the evaluation that may come, or to other processes
            raise
