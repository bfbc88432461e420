"""Random histories of splits, measured times, losses of ranks and restarts, played in one process on the real loader, balancer and
step bookkeeping: every sample counts once, weights add up to one, and the parameters are one device's."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_recovery_passes import _Losses
from torch.utils.data import DataLoader, TensorDataset

from evenstep import vote
from evenstep.environment import Environment
from evenstep.generation_told import Told
from evenstep.loader import EvenLoader
from evenstep.regrouping import regroup, timings_of
from evenstep.session import Session, in_place_of_session
from evenstep.shares import Shares

POLICIES = ("equal", "proportional", "dynamic", "hybrid", "auto", "any", "one")
SECONDS = (0.0, 1e-5, 0.003, 0.01, 0.011, 0.04, 1.0, 60.0)
RANKS = st.sampled_from((4, 3, 5, 2, 4, 1))  # the first is what hypothesis tries most
FEATURES = 3
FOUND = settings(
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
Record = list[tuple[int, int, list[int]]]  # of each step: epoch, batch, samples


@dataclasses.dataclass(frozen=True)
class Setting:
    samples: int
    batch: int
    epochs: int
    drop_last: bool
    policy: str
    seed: int

    def data(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(self.seed)
        given = torch.randn(self.samples, FEATURES, generator=generator, dtype=torch.float64)
        return TensorDataset(given, given.sum(1, keepdim=True).sin(), torch.arange(self.samples))

    def loader(self) -> DataLoader[Any]:
        return DataLoader(self.data(), batch_size=self.batch, shuffle=True, drop_last=self.drop_last)

    def chosen_policy(self) -> Any:
        if self.policy not in ("any", "one"):
            return self.policy

        def split(view: Any) -> list[int]:
            """Any, also of nothing for some; or all for one, another one in every step."""
            draw = random.Random(f"{self.seed} {view.steps} {view.batch} {view.ranks}")
            if self.policy == "one":
                chosen = draw.randrange(view.ranks)
                return [view.batch if rank == chosen else 0 for rank in range(view.ranks)]
            cuts = sorted(draw.randint(0, view.batch) for _ in range(view.ranks - 1))
            return [end - begin for begin, end in zip([0, *cuts], [*cuts, view.batch])]

        return split


settings_of_trainings = st.builds(
    Setting,
    samples=st.integers(3, 20),
    batch=st.integers(1, 7),
    epochs=st.integers(1, 3),
    drop_last=st.booleans(),
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**31),
).filter(lambda one: one.samples >= one.batch)


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)


def loss_of(model: torch.nn.Module, given: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (model(given) - targets).square().mean()


class Rank:
    """One rank's session, as es.prepare and a script with es.epochs leave it, but for the exchange."""

    def __init__(self, setting: Setting, number: int, ranks: int) -> None:
        self.number = number  # in the job
        self.session: Any = Session(dataclasses.replace(Environment(), rank=number, world_size=ranks))
        self.recovery = self.session.recovery = _Losses()
        self.model, self.optimizer = make()
        self.session.optimizer_steps.watch(self.optimizer)
        self.session.devices, self.session.hosts = [f"cpu:{one}" for one in range(ranks)], ["host"] * ranks
        shares = Shares(setting.chosen_policy(), ranks, setting.batch, speeds=[1.0 + one for one in range(ranks)])
        self.loader = EvenLoader(self.session, setting.loader(), train=True, shares=shares, seed=setting.seed)
        self.session.loaders["loader"] = self.loader
        self._batches = self._loop(setting.epochs)

    def _loop(self, epochs: int) -> Iterator[Any]:
        for _ in self.session.loops.run(epochs):
            yield from self.loader

    def fetch(self) -> tuple[Any, Any] | None:
        """The next batch's plan and this rank's part of it; None after the last epoch."""
        with in_place_of_session(self.session):
            batch = next(self._batches, None)
            return None if batch is None else (self.session.latest, batch)

    def gradients(self, batch: Any) -> list[torch.Tensor]:
        """Of the mean over this rank's samples, or over the dummy one, times this rank's weight."""
        weight = self.session.steps.weight.now()
        found = torch.autograd.grad(loss_of(self.model, *batch[:2]), list(self.model.parameters()))
        self.session.steps.begun_backwards += 1
        self.session.steps._fetched.used()
        return [weight * one for one in found]

    def step(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether it counts."""
        for parameter, gradient in zip(self.model.parameters(), gradients):
            parameter.grad = gradient.clone()
        with in_place_of_session(self.session):
            self.optimizer.step()
        return not self.recovery.redoing


class Job:
    """All ranks in step, and the exchange between them."""

    def __init__(self, setting: Setting, ranks: int, record: Record) -> None:
        self.ranks = [Rank(setting, number, ranks) for number in range(ranks)]
        self.record = record
        self.passes = 0

    def step(self, seconds: Callable[[], float], victims: Callable[[int], list[int]]) -> bool:
        """False once there is no batch left. seconds: that a rank was busy. victims(number of ranks): those that are lost in this
        step, after it was shared out."""
        fetched = [rank.fetch() for rank in self.ranks]
        if all(one is None for one in fetched):
            return False
        plans, batches = zip(*(one for one in fetched if one is not None))
        assert len(plans) == len(self.ranks)
        self._check(plans, batches)
        parts = [rank.gradients(batch) for rank, batch in zip(self.ranks, batches)]
        whole = [torch.stack(one).sum(0) for one in zip(*parts)]
        self.passes += 1
        lost = victims(len(self.ranks))
        if lost:
            self.lose(lost, in_step=True)
            garbage = [torch.full_like(one, float("nan")) for one in whole]
            assert not any(rank.step(garbage) for rank in self.ranks)
            return True
        ballots = [self._ballot(plan, seconds()) for plan in plans]
        for rank in self.ranks:
            rank.session.steps.ballots = list(ballots)
        assert all(rank.step(whole) for rank in self.ranks)
        samples = [int(sample) for plan, batch in zip(plans, batches) if plan.samples for sample in batch[2]]
        self.record.append((plans[0].epoch, plans[0].batch, samples))
        return True

    def _check(self, plans: Sequence[Any], batches: Sequence[Any]) -> None:
        """All ranks cut one batch alike."""
        first = plans[0]
        for number, (rank, plan, batch) in enumerate(zip(self.ranks, plans, batches)):
            assert (plan.epoch, plan.batch, plan.total, plan.shares, plan.checksum) == (
                *(first.epoch, first.batch, first.total),
                *(first.shares, first.checksum),
            )
            assert plan.samples == plan.shares[number] and len(batch[2]) == (plan.samples or 1)
            assert rank.session.steps.weight.now() == plan.samples / plan.total
        assert len(first.shares) == len(self.ranks) and min(first.shares) >= 0
        assert sum(first.shares) == first.total
        weights = [rank.session.steps.weight.now() for rank in self.ranks]
        assert sum(weights) == pytest.approx(1.0, abs=1e-15 * len(weights))

    @staticmethod
    def _ballot(plan: Any, seconds: float) -> vote.Ballot:
        return vote.Ballot(
            backward=1,
            step=0,
            samples=plan.samples,
            total=plan.total,
            busy_seconds=seconds,
            loss=0.0,
            weight=plan.weight,
            enabled=1,
            fired=1,
            refired=0,
            checksum=0,
            buffers=0,
            flags=0,
            batches=1,
        )

    def lose(self, lost: Sequence[int], in_step: bool) -> None:
        """As evenstep.generations does it for those that are left, once these are gone."""
        before = [rank.number for rank in self.ranks]
        self.ranks = [rank for place, rank in enumerate(self.ranks) if place not in lost]
        members = [rank.number for rank in self.ranks]
        told = [
            Told(
                *(members, (0, 0, 0, False, False), 0, b"", None, f"cpu:{rank.number}", "host", 0),
                *([(None, None)], [None], [None], timings_of(rank.session, before)),
            )
            for rank in self.ranks
        ]
        for place, rank in enumerate(self.ranks):
            if in_step:
                rank.recovery.lose()
            environment = dataclasses.replace(rank.session.environment, rank=place, world_size=len(members))
            with in_place_of_session(rank.session):
                regroup(rank.session, environment, [], told)
                if not in_step:
                    rank.session.forget_pass()

    def state(self) -> Any:
        """What a checkpoint between two steps has: the same on all ranks but for what each has measured."""
        states = [json.loads(json.dumps(rank.loader.state_dict())) for rank in self.ranks]
        for state in states:
            state.pop("speeds")
        assert all(state == states[0] for state in states)
        first = self.ranks[0]
        return first.loader.state_dict(), first.model.state_dict(), first.optimizer.state_dict(), first.session.step

    def go_on_from(self, state: Any) -> None:
        for rank in self.ranks:
            rank.loader.load_state_dict(json.loads(json.dumps(state[0])))
            rank.model.load_state_dict(state[1])
            rank.optimizer.load_state_dict(copy.deepcopy(state[2]))
            rank.session.step = state[3]


def parameters(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def reference(setting: Setting) -> tuple[Record, torch.Tensor]:
    """One device: the batches of one rank to whom nothing happens, trained by torch alone."""
    record: Record = []
    job = Job(setting, 1, record)
    while job.step(lambda: 0.01, lambda ranks: []):
        pass
    batches = len(setting.loader())
    for epoch in range(setting.epochs):
        seen = [sample for number, _, samples in record if number == epoch for sample in samples]
        assert len(seen) == len(set(seen)) == (batches * setting.batch if setting.drop_last else setting.samples)
        assert set(seen) <= set(range(setting.samples))
    model, optimizer = make()
    data = setting.data().tensors
    for _, _, samples in record:
        optimizer.zero_grad()
        loss_of(model, data[0][samples], data[1][samples]).backward()
        optimizer.step()
    return record, parameters(model)


def live(setting: Setting, data: st.DataObject) -> tuple[Job, Record]:
    """Jobs of 1 to 5 ranks, which lose ranks in steps and between them; each but the last ends between two steps, and another goes on
    with what it left, on as many ranks as it likes."""
    record: Record = []
    seconds = st.sampled_from(SECONDS)
    happens = st.sampled_from(
        (*("nothing",) * 5, "lost in a step", "restart", "lost between two", "restart", "lost in a step")
    )
    job = Job(setting, data.draw(RANKS, label="ranks"), record)

    def some(ranks: int) -> list[int]:
        return data.draw(
            st.lists(st.integers(0, ranks - 1), min_size=1, max_size=max(1, ranks - 2), unique=True), label="lost"
        )

    while True:
        what = data.draw(happens, label="happens")
        several = len(job.ranks) > 1
        if what == "restart" and record:
            state = job.state()
            job = Job(setting, data.draw(RANKS, label="ranks"), record)
            job.go_on_from(state)
        elif what == "lost between two" and several:
            job.lose(some(len(job.ranks)), in_step=False)
        in_step = what == "lost in a step"
        if not job.step(
            lambda: data.draw(seconds, label="seconds"),
            lambda ranks, in_step=in_step: some(ranks) if in_step and ranks > 1 else [],
        ):
            return job, record


def check(setting: Setting, data: st.DataObject) -> None:
    with in_place_of_session(Session(Environment())):
        wanted, alone = reference(setting)
        job, record = live(setting, data)
        assert record == wanted
        for rank in job.ranks:
            assert torch.linalg.vector_norm(parameters(rank.model) - alone) <= 1e-12 * torch.linalg.vector_norm(alone)
            assert torch.equal(parameters(rank.model), parameters(job.ranks[0].model))


@settings(FOUND, max_examples=30)
@given(settings_of_trainings, st.data())
def test_whatever_happens_every_sample_counts_once(setting: Setting, data: st.DataObject) -> None:
    check(setting, data)


@pytest.mark.more
@settings(FOUND, max_examples=2000)
@given(settings_of_trainings, st.data())
def test_whatever_happens_in_many_histories(setting: Setting, data: st.DataObject) -> None:
    check(setting, data)
