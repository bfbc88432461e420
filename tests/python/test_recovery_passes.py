"""What a loader gives again after a void pass, however the script's loops are cut: without ranks that die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

from evenstep._core import EvenstepError
from evenstep.environment import read_environment
from evenstep.generation_passes import Passes
from evenstep.generation_told import Told, changed
from evenstep.generations import Recovery
from evenstep.loader import EvenLoader
from evenstep.regrouping import own_workers, regroup
from evenstep.session import Session, in_place_of_session

Batch = tuple[int, int]  # epoch, number


class _Losses(Recovery):
    """As where a rank is lost in steps that a test names."""

    def __init__(self) -> None:
        Passes.__init__(self)
        self.joining = False
        self._said = "it is played"
        self._asked = 0
        self.said = ""

    def say(self, why: str) -> None:
        self.said = self._said = why

    def lose(self) -> None:
        self._void_passes = self._passes + 1

    def turn_ended(self, counts: bool) -> None:
        super().turn_ended(counts)
        if counts:
            self._passes = self._void_passes = 0


class Training:
    """A script of one rank, which notes the batches of each step that counts."""

    def __init__(self, *batches: int) -> None:
        self.session: Any = Session(read_environment())
        self.recovery = _Losses()
        self.session.recovery = self.recovery
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        self.session.optimizer_steps.watch(self.optimizer)
        self.loaders = [
            EvenLoader(
                self.session,
                DataLoader(TensorDataset(torch.arange(2.0 * count)), batch_size=2, shuffle=True),
                train=True,
                shares=None,
                seed=7,
            )
            for count in batches
        ]
        self.session.loaders.update({f"loader_{number}": one for number, one in enumerate(self.loaders)})
        self.made: list[list[Batch]] = []
        self.lost: list[int] = []  # the steps in which a rank is lost, by their number
        self._now: list[Batch] = []
        self._tries = 0

    def backward(self) -> None:
        """Over the batch that came last."""
        plan = self.session.latest or self.session.steps.last_plan
        self._now.append((plan.epoch, plan.batch))
        self.session.steps.begun_backwards += 1
        self.session.steps._fetched.used()

    def step(self) -> bool:
        """Whether it counts."""
        if self.lost and len(self.made) == self.lost[0]:
            del self.lost[0]
            self.recovery.lose()
            self.session.pass_state.want()
        self.optimizer.step()
        now, self._now = self._now, []
        if not self.recovery.redoing:
            self.made.append(now)
        return not self.recovery.redoing


@pytest.fixture
def training() -> Iterator[Callable[..., Training]]:
    with in_place_of_session(Session(read_environment())):
        yield Training


def _undisturbed(script: Callable[[Training], None], make: Callable[..., Training], *batches: int) -> list[list[Batch]]:
    one = make(*batches)
    script(one)
    return one.made


def across_epochs(one: Training) -> None:
    """Four batches a step, of epochs of five."""
    fetched = 0
    while len(one.made) < 4:
        for _ in one.loaders[0]:
            one.backward()
            fetched += 1
            if fetched % 4 == 0:
                one.step()


def after_the_loop(one: Training) -> None:
    for _ in one.session.loops.run(3):
        for _ in one.loaders[0]:
            one.backward()
        one.step()


def after_two_loops(one: Training) -> None:
    for epoch in one.session.loops.run(4):
        for _ in one.loaders[0]:
            one.backward()
        if epoch % 2:
            one.step()


def iterators_of_one_batch(one: Training) -> None:
    while len(one.made) < 3:
        for _ in range(2):
            next(iter(one.loaders[0]))
            one.backward()
        one.step()


def held_iterators_of_one_batch(one: Training) -> None:
    while len(one.made) < 4:
        batches = iter(one.loaders[0])
        next(batches)
        one.backward()
        one.step()


def held_iterators_of_an_accumulated_step(one: Training) -> None:
    while len(one.made) < 4:
        for _ in range(2):
            batches = iter(one.loaders[0])
            next(batches)
            one.backward()
        one.step()


def side_by_side(one: Training) -> None:
    """The first loader gives one batch more than is used."""
    for _ in one.session.loops.run(2):
        for _ in zip(one.loaders[0], one.loaders[1]):
            one.backward()
            one.step()


def one_after_the_other(one: Training) -> None:
    """Of the first two's last batches one is used by nobody."""
    for _ in zip(one.loaders[0], one.loaders[1]):
        one.backward()
        one.step()
    for _ in one.loaders[2]:
        one.backward()
        one.step()


def after_a_look(one: Training) -> None:
    held = next(iter(one.loaders[0]))
    for _ in one.session.loops.run(2):
        for _ in one.loaders[0]:
            one.backward()
            one.step()
    del held


@pytest.mark.parametrize(
    ("script", "batches"),
    [
        (across_epochs, (5,)),
        (after_the_loop, (3,)),
        (after_two_loops, (3,)),
        (iterators_of_one_batch, (3,)),
        (held_iterators_of_one_batch, (3,)),
        (held_iterators_of_an_accumulated_step, (3,)),
        (side_by_side, (4, 3)),
        (one_after_the_other, (3, 2, 3)),
        (after_a_look, (3,)),
    ],
)
def test_every_step_has_the_batches_that_it_would_have_had(
    training: Callable[..., Training], script: Callable[[Training], None], batches: tuple[int, ...]
) -> None:
    wanted = _undisturbed(script, training, *batches)
    for lost in ([0], [1], [1, 1], list(range(len(wanted))), [len(wanted) - 1]):
        one = training(*batches)
        one.lost = list(lost)
        script(one)
        assert one.made == wanted and not one.lost, lost


def test_a_loop_that_is_left_after_its_void_step_makes_one_less(training: Callable[..., Training]) -> None:
    one = training(5)
    one.lost = [2]
    for _ in one.session.loops.run(2):
        for number, _ in enumerate(one.loaders[0]):
            one.backward()
            one.step()
            if number == 2:
                break
    assert one.made == [[(0, 0)], [(0, 1)], [(1, 0)], [(1, 1)], [(1, 2)]]


def test_a_checkpoint_after_a_void_step_has_the_cursor_of_before_it(training: Callable[..., Training]) -> None:
    def cursors(one: Training) -> list[Any]:
        found = []
        for _ in one.session.loops.run(2):
            for number, _ in enumerate(one.loaders[0]):
                one.backward()
                if number % 2:
                    counts = one.step()
                    found.append((counts, one.loaders[0].state_dict()))
            counts = one.step()  # of the last batch, after the loop
            found.append((counts, one.loaders[0].state_dict()))
        return found

    wanted = cursors(training(3))
    for lost in range(1, 4):
        one = training(3)
        one.lost = [lost]
        found = cursors(one)
        place = [counts for counts, _ in found].index(False)
        assert place == lost
        for key in ("epoch", "batch", "drawn", "samples", "iterations"):
            assert found[place][1][key] == wanted[lost - 1][1][key], (lost, key)
        assert [state for counts, state in found if counts] == [state for _, state in wanted], lost


def test_another_loader_is_not_asked_in_the_place_of_one_whose_batch_was_lost(
    training: Callable[..., Training],
) -> None:
    one = training(3, 3)
    one.lost = [0]
    with pytest.raises(EvenstepError, match="asks another loader for its next one"):
        for _ in one.loaders[0]:
            one.backward()
            one.step()
            for _ in one.loaders[1]:
                one.backward()
                one.step()
                break


def one_ahead(one: Training) -> None:
    """As a prefetcher does."""
    batches = iter(one.loaders[0])
    held = [next(batches)]
    for coming in batches:
        held.clear()
        one.backward()
        one.step()
        held.append(coming)
    one.backward()
    one.step()


def next_before_the_step(one: Training) -> None:
    batches = iter(one.loaders[0])
    next(batches)
    for _ in range(4):
        one.backward()
        next(batches)
        one.step()


def step_after_the_next(one: Training) -> None:
    """At the loop's top, once the next batch has come."""
    for number, _ in enumerate(one.loaders[0]):
        if number % 2 == 0 and number:
            one.step()
        one.backward()


def single_ones_ahead(one: Training) -> None:
    """Epochs of two batches: each iteration has one backward while it is under way."""
    for _ in range(3):
        one_ahead(one)


@pytest.mark.parametrize(
    ("script", "batches"),
    [(one_ahead, 5), (next_before_the_step, 6), (step_after_the_next, 9), (single_ones_ahead, 2)],
)
def test_a_script_that_fetches_ahead_of_its_step_starts_again(
    training: Callable[..., Training], script: Callable[[Training], None], batches: int
) -> None:
    for lost in range(3):
        one = training(batches)
        one.lost = [lost]
        with pytest.raises(EvenstepError, match="fetches a batch before it has made the step on an older one"):
            script(one)
        assert len(one.made) == lost


def test_a_script_that_fetches_ahead_says_so_before_a_loss(training: Callable[..., Training]) -> None:
    one = training(5)
    one_ahead(one)
    assert "fetches a batch" in one.recovery.said


def two_a_backward(one: Training) -> None:
    """The last one of an epoch is left over."""
    for _ in one.session.loops.run(2):
        batches = iter(one.loaders[0])
        for first, second in zip(batches, batches):
            one.backward()
            one.step()
            del first, second


def test_a_script_with_several_batches_a_backward_goes_on_from_its_second_step(
    training: Callable[..., Training],
) -> None:
    wanted = _undisturbed(two_a_backward, training, 5)
    for lost in ([1], [1, 1], [2], [3], [1, 2, 3]):
        one = training(5)
        one.lost = list(lost)
        two_a_backward(one)
        assert one.made == wanted and not one.lost and not one.recovery.said, lost


def _by_torch(average: AveragedModel, model: torch.nn.Module) -> None:
    average.update_parameters(model)


def _by_data(average: AveragedModel, model: torch.nn.Module) -> None:
    for one, other in zip(average.module.parameters(), model.parameters()):
        one.data.mul_(0.9).add_(other.data, alpha=0.1)


@pytest.mark.parametrize("update", [_by_torch, _by_data])
def test_parameters_that_the_script_changes_by_itself(
    training: Callable[..., Training], update: Callable[[AveragedModel, torch.nn.Module], None]
) -> None:
    ends = []
    for lost in ([], [0], [1, 1], [0, 3]):
        one = training(4)
        one.lost = list(lost)
        one.recovery._said = ""  # it could go on
        model = torch.nn.Linear(3, 2)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        average = AveragedModel(model)
        one.session.models["average"] = average
        for _ in one.loaders[0]:
            one.backward()
            if one.step():
                with torch.no_grad():
                    model.weight.add_(1.0)
            update(average, model)
        assert not one.lost and not one.recovery.said and len(one.made) == 4
        ends.append(torch.cat([part.detach().reshape(-1).double() for part in average.state_dict().values()]))
    assert all(torch.equal(end, ends[0]) for end in ends), ends


def test_an_average_that_changes_before_its_step_is_made_starts_again(training: Callable[..., Training]) -> None:
    one = training(4)
    one.lost = [2]
    one.recovery._said = ""
    model = torch.nn.Linear(3, 2)
    average = AveragedModel(model)
    one.session.models["average"] = average
    with pytest.raises(EvenstepError, match="update averages after optimizer"):
        for _ in one.loaders[0]:
            average.update_parameters(model)
            one.backward()
            one.step()


def test_fixed_parameters_keep_nobody_from_going_on(training: Callable[..., Training]) -> None:
    one = training(4)
    one.lost = [0, 2]
    one.recovery._said = ""
    one.session.models["fixed"] = torch.nn.Sequential(
        torch.nn.Linear(3, 2).requires_grad_(False), torch.nn.BatchNorm1d(2)
    )
    trained = torch.nn.Linear(2, 2)
    one.session.models["trained"] = trained
    one.session.optimizers["trained"] = torch.optim.SGD(
        [*trained.parameters(), *one.session.models["fixed"][1].parameters()]
    )
    for _ in one.loaders[0]:
        one.backward()
        one.step()
        with torch.no_grad():
            trained.weight.add_(1.0)
    assert len(one.made) == 4 and not one.recovery.said


def test_all_members_begin_with_one_batch_a_step(training: Callable[..., Training]) -> None:
    loader = training(8).loaders[0]
    loader.fetched = 4
    loader.stepped()
    assert loader.batches_per_step == 4 and loader.steps_until(4) == 1
    loader.shrink(None)
    assert loader.batches_per_step == 1 and loader.steps_until(4) == 4


def test_who_joins_gets_workers_where_the_others_have_been_given_some(training: Callable[..., Training]) -> None:
    def told(*workers: tuple[int, int] | None) -> Told:
        return Told([0, 1], (1, 1, 0, True, False), 0, b"", None, "cpu:0", "box", 0, [], [], list(workers), {})

    one = training(8, 8)
    for others in ((None, None), ((2, 3), None), ((3, 2), None)):
        regroup(one.session, one.session.environment, [], [told(*own_workers(one.session)), told(*others)])
    assert own_workers(one.session) == [(2, 3), None]  # those that it has stay
    inner = [loader.feed._inner for loader in one.loaders]
    assert [each.num_workers for each in inner] == [2, 0] and inner[0].prefetch_factor == 3


@pytest.mark.parametrize(
    ("gone", "new", "members", "words"),
    [
        ([1], [], [0, 2], "ranks 0 and 2 go on without rank 1"),
        ([1, 2], [], [0], "rank 0 goes on without ranks 1 and 2"),
        ([], [3], [0, 2, 3], "rank 3 joins ranks 0 and 2"),
        ([0], [3], [2, 3], "rank 3 joins rank 2 without rank 0"),
    ],
)
def test_who_goes_and_who_comes_is_said(gone: list[int], new: list[int], members: list[int], words: str) -> None:
    assert changed(4, gone, new, members, 0.0051) == f"generation 4: {words} after 5 ms"
