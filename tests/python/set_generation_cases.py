"""Scripts whose ranks train in process sets, and kill themselves where a test says."""

from __future__ import annotations

from generation_cases import HEAD

# Arguments: deaths, and the sets as "01,23". Each set compares its model with that of one process. At step 7 each waits until the
# others have come as far, or are lost as a whole: so all train on after a loss, whichever set has it.
SETS = (
    HEAD
    + """
import pathlib, time

parts = [[int(one) for one in part] for part in sys.argv[2].split(",")]
sets = [es.ProcessSet(part) for part in parts]
which = next((number for number, one in enumerate(sets) if one.included), None)
plain_make = make


def make():
    made = plain_make()
    with torch.no_grad():
        for p in made[0].parameters():
            p.mul_(1 + which)  # each set trains a model of its own
    return made


def is_over(number):
    job = es.session().recovery._board.job
    return pathlib.Path(f"six-{number}").exists() or not any(job.has(one, job.number) for one in parts[number])


def others_have_come(step):
    if step == 6:
        pathlib.Path(f"six-{which}").touch()
    while step == 7 and not all(map(is_over, range(len(parts)))):
        time.sleep(0.01)


if which is not None:
    with sets[which]:
        model, optimizer, scheduler, loader = es.prepare(*make(), loader)
        passes = 0
        for epoch in es.epochs(EPOCHS):
            for batch in loader:
                others_have_come(es.step())
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                here("forward")
                loss.backward()
                es.reduce_mean(loss)
                optimizer.step()
                here("applied")
                scheduler.step()
                passes += 1
        compare(model, optimizer, loader.seed)
        number = es.session().recovery.number
        es.prepare(torch.nn.Linear(2, 1))  # a group more: the job's store may be gone
        es.barrier()
        print(f"rank {rank}: {passes} passes, generation {number}, {sets[which].size} in its set", flush=True)
es.barrier()
print(f"rank {rank} ended outside as {es.rank()} of {es.world_size()}", flush=True)
"""
)

# Set 1 comes to the barrier of all, and waits there for longer than for one that does not come, while set 0 is at step 10.
WAITED = SETS.replace(
    "def is_over",
    """
from types import SimpleNamespace

from evenstep import generations

plain_look, looks = Recovery._look_for_newer, []


def look(self, number, slow):
    if self.beside_sets:
        looks.append(number)
        if len(looks) == 3:
            generations.time = SimpleNamespace(monotonic=lambda: 100.0 + time.monotonic())
        if len(looks) == 6:
            pathlib.Path("waited").touch()
    plain_look(self, number, slow)


Recovery._look_for_newer = look


def is_over""",
).replace(
    "def others_have_come(step):",
    """def others_have_come(step):
    while step == 10 and which == 0 and deaths and not pathlib.Path("waited").exists():
        time.sleep(0.01)""",
)

SHARED = (
    HEAD
    + """
one, other = es.ProcessSet([0, 1, 2, 3]), es.ProcessSet([0, 1])

with one:
    model, optimizer, scheduler, loader = es.prepare(*make(), loader)
    for batch in loader:
        here("forward")
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
es.barrier()
print("ended", flush=True)
"""
)
