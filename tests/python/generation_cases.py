"""Scripts whose ranks kill themselves where a test says, and compare what is left with one process at their end."""

from __future__ import annotations

# PLAYED_HOSTS="a,a,b": processes of one machine take each other for ranks of several hosts, each with a board of its own
# (the agent's one board serves all, but shows each only the processes of its host).
ON_HOSTS = """
import os, pathlib
from evenstep import _core

names = os.environ["PLAYED_HOSTS"].split(",")
host_of = lambda rank: names[int(rank) % len(names)]
os.environ["EVENSTEP_HOST_ID"] = own_host = host_of(os.environ["RANK"])
os.environ["UCX_TLS"] = "tcp,self"


class Board:
    plain = _core.Generation

    def __init__(self, fd):
        self.whole = self.plain(fd)

    def __getattr__(self, name):
        return getattr(self.whole, name)

    def process(self, rank):
        return self.whole.process(rank) if host_of(rank) == own_host else 0

    def give(self, rank, number, fd):
        new = pathlib.Path(f"gift-{own_host}-{number}-{rank}")
        new.write_text(f"{rank} {os.getpid()} {fd}")
        new.replace(f"gift-{own_host}-{number}")

    def given(self, number):
        own = pathlib.Path(f"gift-{own_host}-{number}")
        for path in (own, *pathlib.Path().glob(f"gift-[a-z]-{number}")):  # the agents would bring that of another host
            try:
                rank, process, fd = map(int, path.read_text().split())
            except FileNotFoundError:
                continue
            if self.whole.has(rank, number):
                return process, fd
        return None

    def since(self, rank, number):
        while number and self.whole.has(rank, number - 1):
            number -= 1
        return number

    def gives_away(self, rank, number):
        members = [one for one in range(self.whole.ranks) if self.whole.has(one, number)]
        first = min(self.since(one, number) for one in members)
        return rank == next(one for one in members if self.since(one, number) == first)


_core.Generation = Board
"""

HEAD = '''
import copy, os, sys
if "PLAYED_HOSTS" in os.environ:
    exec(os.environ["PLAYED_HOSTS_CODE"])
import signal
import torch
import evenstep as es
from evenstep.errors import error_of
from evenstep.generations import Recovery
from evenstep.mended_group import MendedGroup
from evenstep.order import GlobalOrder
from evenstep.steps import Steps

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
rank = os.environ["RANK"]
deaths = sys.argv[1].split(",") if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else []


def here(point):
    """Dies here where the test says so: RANK@POINT:STEP; RANK!POINT:STEP kills the agent, once in a job."""
    if f"{rank}!{point}:{es.step()}" in deaths:
        deaths.remove(f"{rank}!{point}:{es.step()}")
        os.kill(os.getppid(), 9)
    if f"{rank}@{point}:{es.step()}" in deaths:
        os.kill(os.getpid(), 9)


def around(owner, name, before, after):
    plain = getattr(owner, name)

    def call(*arguments, **options):
        here(before)
        result = plain(*arguments, **options)
        here(after)
        return result

    setattr(owner, name, call)


around(Steps, "_exchange", "vote", "voted")
around(MendedGroup, "meet", "commit", "committed")
around(Recovery, "_meet", "meeting", "met")


def dies_in_the_meeting(step, comes_out=lambda: None):
    """Rank 1, of three, in the meeting at this step, out of which rank 0 has come; rank 2 hears of it there. comes_out: what a rank
    does before that."""
    plain = MendedGroup.meet

    def meet(group):
        plain(group)
        if es.step() == step and len(es.session().recovery.members) == 3:
            comes_out()
            if rank == "1":
                os.kill(os.getpid(), signal.SIGKILL)  # in other words than the scripts' own death, which tests replace
            if rank == "2":
                raise error_of("EVEN_ERR_PEER_LOST", "as if it had heard of it here")

    MendedGroup.meet = meet


torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
EPOCHS, BATCH = 3, 12


def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)


def loss_of(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def one_process(seed, per_step=1):
    """What a process by itself makes of the same batches."""
    model, optimizer, scheduler = make()
    order = GlobalOrder(torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True), 1)
    for epoch in range(EPOCHS):
        for number, indices in enumerate(order.batches(seed, epoch)):
            batch = [torch.stack(part) for part in zip(*(data[i] for i in indices))]
            (loss_of(model, batch) / per_step).backward()
            if (number + 1) % per_step == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    return model, optimizer


def compare(model, optimizer, seed, per_step=1):
    other, its = one_process(seed, per_step)
    flat = lambda one: torch.cat([p.detach().reshape(-1) for p in one.parameters()])
    far = float((flat(model) - flat(other)).norm() / flat(other).norm())
    same = optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"]
    print(f"rank {rank} of {es.world_size()} at step {es.step()}: {far:.1e} apart, rate {'kept' if same else 'other'}", flush=True)


loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
'''


def with_workers(source: str) -> str:
    """Batches are loaded ahead, by workers that stay."""
    plain = "loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)"
    assert source.count(plain) == 1
    return source.replace(plain, f"{plain[:-1]}, num_workers=2, persistent_workers=True)")


PLAIN_LOOP = (
    HEAD
    + """
model, optimizer, scheduler, loader = es.prepare(*make(), loader)
passes = 0
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        es.reduce_mean(loss)
        optimizer.step()
        here("applied")
        scheduler.step()
        passes += 1
es.barrier()
compare(model, optimizer, loader.seed)
print(f"rank {rank} made {passes} passes as process {os.getpid()}", flush=True)
"""
)

# With an average of the parameters, which is updated after each optimizer.step(), also of a pass that counts nothing.
AVERAGED = (
    PLAIN_LOOP.replace(
        "model, optimizer, scheduler, loader = es.prepare(*make(), loader)",
        "made = make()\naverage = torch.optim.swa_utils.AveragedModel(made[0])\n"
        "model, optimizer, scheduler, loader, average = es.prepare(*made, loader, average)",
    ).replace('here("applied")', "average.update_parameters(model)")
    + """
values = torch.cat([part.detach().reshape(-1).double() for part in average.state_dict().values()])
print("average", *(f"{float(one):.12e}" for one in (values.sum(), values.square().sum(), values[0])), flush=True)
"""
)

# RANK~POINT:STEP stands still there for good, RANK^POINT:STEP until the others have given it up, RANK!POINT:STEP hangs.
STOPS = """
import pathlib, signal, subprocess, threading

plain_newer, over = Recovery._newer, set()


def newer(self, tried, error):
    pathlib.Path("waits").touch()
    return plain_newer(self, tried, error)


def here(point):
    for what in (f"{rank}{how}{point}:{es.step()}" for how in "~^!"):
        if what not in deaths or what in over:
            continue
        over.add(what)
        if "^" in what:
            pathlib.Path("waits").unlink(missing_ok=True)
            until = f"until [ -e waits ]; do sleep 0.01; done; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", until], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if "!" in what:
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGSTOP)


Recovery._newer = newer
"""

HELD_UP = (
    HEAD
    + STOPS
    + PLAIN_LOOP[len(HEAD) :].replace(
        "passes = 0", "model.register_forward_pre_hook(lambda *_: here('in'))\npasses = 0"
    )
)

ACCUMULATING = (
    HEAD
    + """
model, optimizer, scheduler, loader = es.prepare(*make(), loader)
for epoch in es.epochs(EPOCHS):
    for number, batch in enumerate(loader):
        if number % 2 == 0:
            with es.no_sync():
                (loss_of(model, batch) / 2).backward()
            here("between")
        else:
            (loss_of(model, batch) / 2).backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
compare(model, optimizer, loader.seed, per_step=2)
"""
)

TRAINER = (
    HEAD
    + """
model, optimizer, scheduler = make()
told = []
trainer = es.Trainer(model, optimizer, lambda model, batch: (here("forward"), loss_of(model, batch))[1],
                     scheduler=scheduler, on_step=lambda trainer: told.append(trainer.step))
trainer.fit(loader, epochs=EPOCHS)
print("steps told", "once each" if told == list(range(1, 19)) else told, flush=True)
compare(model, optimizer, es.session().loaders["loader"].seed)
"""
)

# Rank 2 comes out of no commit while rank 0 does: the loss is heard of there.
HALF_COMMITTED = (
    HEAD
    + """
model, optimizer, scheduler, loader = es.prepare(*make(), loader)
dies_in_the_meeting(step=4)
passes = 0
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
        passes += 1
es.barrier()
compare(model, optimizer, loader.seed)
print(f"rank {rank} made {passes} passes", flush=True)
"""
)

NORMS = (
    HEAD
    + """
class Watched(torch.nn.Module):
    # Its forward changes buffers: in place, by another object, and without a version.
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("level", torch.zeros(6))
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.level = 0.9 * self.level + 0.1 * x.mean(0)
            self.last.data.fill_(float(self.calls))
        return self.layers(x)


def make():
    torch.manual_seed(1)
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)


def state_of(one):
    return torch.cat([value.detach().double().reshape(-1) for value in (*one.parameters(), *one.buffers())])


def scaler_of():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)


for call in ("norm_statistics", "norm_sums"):
    around(MendedGroup, call, "statistics", "counted")
model, optimizer, scheduler, scaler, loader = es.prepare(*make(), scaler_of(), loader)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        here("applied")
        scaler.update()
        scheduler.step()
es.barrier()
plain, its_scaler = make(), scaler_of()
for epoch in range(EPOCHS):
    for indices in GlobalOrder(loader.loader, 1).batches(loader.seed, epoch):
        plain[1].zero_grad()
        its_scaler.scale(loss_of(plain[0], [torch.stack(part) for part in zip(*(data[i] for i in indices))])).backward()
        its_scaler.step(plain[1])
        its_scaler.update()
        plain[2].step()
far = float((state_of(model) - state_of(plain[0])).norm() / state_of(plain[0]).norm())
same = scheduler.state_dict() == plain[2].state_dict() and scaler.state_dict() == its_scaler.state_dict()
print(f"rank {rank} of {es.world_size()} at step {es.step()}: {far:.1e} apart, rate {'kept' if same else 'other'}", flush=True)
"""
)

# The script has a process group of Gloo's of its own.
OWN_GLOO = (
    HEAD
    + """
model, optimizer, scheduler = make()
es.barrier()
group = torch.distributed.new_group(backend="gloo")
model, optimizer, loader = es.prepare(model, optimizer, loader)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        here("forward")
        loss_of(model, batch).backward()
        optimizer.step()
print("ended with", es.world_size(), "ranks", flush=True)
"""
)

# A wrapper has closed rank 1's descriptors.
WRAPPED = """
import os, sys

if os.environ["RANK"] == "1":
    os.close(int(os.environ["EVENSTEP_GENERATION_FD"]))
import torch
import evenstep as es

rows = torch.utils.data.TensorDataset(torch.randn(4, 2), torch.randn(4, 1))
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(rows, batch_size=2), engine="torch")
for batch in loader:
    torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
    optimizer.step()
assert es.session().recovery is None
print("ended at step", es.step(), flush=True)
"""

# Waits before a step, once a rank was lost, until the agent has somebody that can join.
REPLACED = (
    HEAD.replace("import copy, os, sys", "import copy, os, sys, time")
    + """
from evenstep.generation_gift import Gift

around(Gift, "wrap", "giving", "given")
around(Gift, "open", "opening", "opened")
waits = [int(step) for step in sys.argv[2].split(",") if step]
FULL = int(os.environ.get("FULL") or os.environ["WORLD_SIZE"])
joined = os.environ.get("EVENSTEP_JOINS") == "1"


def wait_for_somebody():
    recovery = es.session().recovery
    if not waits or es.step() < waits[0] or len(recovery.members) == FULL:
        return
    waits.pop(0)
    until = time.monotonic() + 300
    while recovery._memory.wished != 1 and time.monotonic() < until:
        time.sleep(0.005)


class Dropped(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        return data[index]


es.barrier()
model, optimizer, scheduler, loader = es.prepare(*make(), loader)
here("prepared")
es.barrier()
seen = es.prepare(loader=torch.utils.data.DataLoader(Dropped(), batch_size=5), train=False)
passes, first = 0, es.step()
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        if not joined:
            wait_for_somebody()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        es.reduce_mean(loss)
        optimizer.step()
        here("applied")
        scheduler.step()
        passes += 1
es.barrier()
compare(model, optimizer, loader.seed)
found = es.evaluate(model, seen, loss_of)
print("evaluated", abs(found - float(loss_of(model, data[:]).detach())) < 1e-12, "on", es.world_size(), flush=True)
folder = os.environ["EVENSTEP_CHECKPOINT_DIR"]
print("state saved:", sorted(os.listdir(folder)) if os.path.isdir(folder) else [], flush=True)
print(f"rank {rank} began at step {first} and made {passes} passes as process {os.getpid()}", flush=True)
"""
)

# Evaluates shuffled samples that draw random numbers, by loaders of its own, after each epoch.
SHUFFLED = (
    REPLACED[: REPLACED.index("es.barrier()\nmodel")]
    + """
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        return torch.tensor(float(index)), torch.randn(())


def judge(model, batch):
    here("judging")
    return {"square": batch[0] ** 2, "drawn": batch[1] * (1 + batch[0])}


def made():
    return es.prepare(loader=torch.utils.data.DataLoader(Noisy(), batch_size=5, shuffle=True), train=False)


model, optimizer, scheduler, loader = es.prepare(*make(), loader)
one, two = made(), made()
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        if not joined:
            wait_for_somebody()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        optimizer.step()
        scheduler.step()
    found, same, later = (es.evaluate(model, which, judge) for which in (one, two, two))
    once = found["square"] == sum(i * i for i in range(len(data))) / len(data)
    alike, anew = abs(found["drawn"] - same["drawn"]) < 1e-12, abs(found["drawn"] - later["drawn"]) > 1e-3
    print(f"rank {rank} at {es.step()}: once {once}, alike {alike}, anew {anew}, on {es.world_size()}", flush=True)
"""
)

# Evaluates in the loop, and asks for what every rank has after each epoch.
EVALUATED = (
    HEAD
    + """
def judge(model, batch):
    here("judging")
    return (model(batch[0]) - batch[1]).square().mean(1)


model, optimizer, scheduler, loader = es.prepare(*make(), loader)
right, lost = set(), 0
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        here("applied")
        es.reduce_mean(loss)
        scheduler.step()
        if es.step() % 6 == 5:
            found = es.evaluate(model, torch.utils.data.DataLoader(data, batch_size=5), judge)
            assert abs(found - float(loss_of(model, data[:]).detach())) < 1e-12
            right.add(es.step())
    while True:
        try:
            here("gathering")
            rows = es.gather(torch.tensor([[float(rank)]]), batch=False)
            break
        except es.RankLost:
            lost += 1
    assert len(rows) == es.world_size()
compare(model, optimizer, loader.seed)
print(f"evaluated right after {len(right)} steps, told {lost} times that a rank was lost", flush=True)
"""
)

# With random numbers of each block's own; argv[2]: steps before which one waits until somebody can join; "norms": a BatchNorm,
# at which all blocks of the batch meet.
BITWISE = (
    HEAD.replace("import copy, os, sys", "import copy, hashlib, os, sys, time")
    + """
waits = [int(step) for step in sys.argv[2].split(",") if step]
FULL = int(os.environ.get("FULL") or os.environ["WORLD_SIZE"])
whole = es.session()
es.step = lambda: whole.step  # a block of many is a rank of its own, as it sees itself
around(MendedGroup, "gather_rows", "statistics", "counted")


def wait_for_somebody():
    recovery = whole.recovery
    if recovery is None or not waits or es.step() < waits[0] or len(recovery.members) == FULL:
        return
    waits.pop(0)
    until = time.monotonic() + 300
    while recovery._memory.wished != 1 and time.monotonic() < until:
        time.sleep(0.005)


def train_step(model, batch):
    wait_for_somebody()
    here("forward")
    return loss_of(model, batch)


model, optimizer, scheduler = make()
model.insert(1, torch.nn.Dropout(0.2))
if "norms" in sys.argv:
    model.insert(1, torch.nn.BatchNorm1d(16))
    optimizer.add_param_group({"params": model[1].parameters()})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)
config = es.Config(exact="bitwise", block=int(os.environ.get("BLOCK", 2)), threads=1, clip_norm=0.5)
losses = []
trainer = es.Trainer(model, optimizer, train_step, scheduler=scheduler, config=config,
                     on_step=lambda trainer: losses.append(trainer.loss))
trainer.fit(loader, epochs=EPOCHS)
state = b"".join(one.detach().numpy().tobytes() for one in (*model.parameters(), *model.buffers()))
print("loss", losses[-1].hex(), "in", es.step(), "steps, told", len(losses), "on", es.world_size(), flush=True)
print("bits", hashlib.sha256(state).hexdigest(), flush=True)
"""
)
