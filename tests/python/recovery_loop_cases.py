"""Scripts with other loops than one over one loader, whose ranks kill themselves where a test says."""

from __future__ import annotations

from generation_cases import HALF_COMMITTED, HEAD

# `waits`: the steps before which one waits until somebody can join.
WAITING = """
joined = os.environ.get("EVENSTEP_JOINS") == "1"


def wait_for_somebody():
    recovery = es.session().recovery
    if joined or not waits or es.step() < waits[0] or len(recovery.members) == int(os.environ["WORLD_SIZE"]):
        return
    waits.pop(0)
    until = time.monotonic() + 300
    while recovery._memory.wished != 1 and time.monotonic() < until:
        time.sleep(0.005)
"""

# Four loops one after the other: over two loaders side by side, over a stream, and two with the step after the loop: over a
# whole epoch's batches, over each batch that an iterator of its own gives. argv[3:]: of the stream.
LOOPS = (
    HEAD.replace("import copy, os, sys", "import copy, os, sys, time")
    + WAITING
    + """
waits = [int(step) for step in sys.argv[2].split(",") if step]
workers = int(sys.argv[3])
ways = sys.argv[4:]  # "skip": the stream passes over samples without drawing them; "state": it says where it is
drawn = 0


class Samples:
    def __init__(self, indices):
        self.left = list(indices)

    def __iter__(self):
        return self

    def __next__(self):
        global drawn
        if not self.left:
            raise StopIteration
        drawn += 1
        return data[self.left.pop(0)]


class Skipped(Samples):
    def skip(self, count):
        passed = min(count, len(self.left))
        del self.left[:passed]
        return passed


class Stated(Samples):
    def state_dict(self):
        return {"left": list(self.left)}

    def load_state_dict(self, state):
        self.left = list(state["left"])


class Stream(torch.utils.data.IterableDataset):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def order(self, worker):
        order = torch.randperm(72, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return order[worker :: max(1, workers)]

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        kind = Skipped if "skip" in ways else Stated if "state" in ways else Samples
        return kind(self.order(0 if info is None else info.id))


def batch_of(indices):
    return [torch.stack(part) for part in zip(*(data[i] for i in indices))]


def stream_batches(epoch):
    stream = Stream()
    stream.set_epoch(epoch)
    cut = [[order[at : at + BATCH] for at in range(0, len(order), BATCH)]
           for order in (stream.order(worker) for worker in range(max(1, workers)))]
    return [batch_of(one) for turn in zip(*cut) for one in turn]


def loader_of(many, **options):
    return torch.utils.data.DataLoader(torch.utils.data.Subset(data, range(many)), batch_size=BATCH, shuffle=True, **options)


plain = loader_of(72), loader_of(60), loader_of(48), loader_of(72)
model, optimizer, scheduler, first, second, whole, single, stream = es.prepare(
    *make(), *plain, torch.utils.data.DataLoader(Stream(), batch_size=BATCH, num_workers=workers))


def step():
    wait_for_somebody()
    optimizer.step()
    here("applied")
    scheduler.step()
    optimizer.zero_grad()


for epoch in es.epochs(2):
    for one, other in zip(first, second):
        loss = loss_of(model, one)
        here("forward")
        (loss + loss_of(model, other)).backward()
        step()
for epoch in es.epochs(2):
    for number, batch in enumerate(stream):
        here("forward")
        if number % 2 == 0:
            with es.no_sync():
                loss_of(model, batch).backward()
            here("between")
        else:
            loss_of(model, batch).backward()
            step()
for epoch in es.epochs(3):
    for number, batch in enumerate(whole):
        loss_of(model, batch).backward()
        if number == 1:
            here("between")
    step()
while es.step() < 24:
    batch = next(iter(single))
    here("forward")
    loss_of(model, batch).backward()
    step()
es.barrier()
left = drawn

mine, optimizer_alone, scheduler_alone = make()


def alone(*batches):
    for batch in batches:
        loss_of(mine, batch).backward()
    optimizer_alone.step()
    scheduler_alone.step()
    optimizer_alone.zero_grad()


def of(loader, epoch):
    return [batch_of(indices) for indices in GlobalOrder(loader.loader, 1).batches(loader.seed, epoch)]


for epoch in range(2):
    for pair in zip(of(first, epoch), of(second, epoch)):
        alone(*pair)
for epoch in range(2):
    given = stream_batches(epoch)
    for pair in zip(given[::2], given[1::2]):
        alone(*pair)
for epoch in range(3):
    alone(*of(whole, epoch))
for epoch in range(5):
    alone(of(single, epoch)[0])
flat = lambda one: torch.cat([p.detach().reshape(-1) for p in one.parameters()])
far = float((flat(model) - flat(mine)).norm() / flat(mine).norm())
same = scheduler.state_dict() == scheduler_alone.state_dict()
print(f"rank {rank} of {es.world_size()} at step {es.step()}: {far:.1e} apart, rate {'kept' if same else 'other'}", flush=True)
"""
)

# A step on each of two loaders in turn: what is lost cannot come again in its place.
IN_TURNS = (
    HEAD
    + """
other = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)
model, optimizer, scheduler, loader, other = es.prepare(*make(), loader, other)


def step_on(batch):
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    here("forward")
    optimizer.step()


for epoch in es.epochs(EPOCHS):
    others = iter(other)
    for batch in loader:
        step_on(batch)
        step_on(next(others))
print("ended with", es.world_size(), "ranks at step", es.step(), flush=True)
"""
)

# Automatic checkpoints, whose last one is remembered at its step, and one of the script's; all are read at the end.
CHECKPOINTED = (
    HEAD.replace("import copy, os, sys", "import copy, importlib, os, pathlib, sys")
    + """
saving, last = (importlib.import_module(f"evenstep.{name}") for name in ("checkpoint", "checkpoint_last"))
around(saving, "pack_random", "packing", "packed")
around(saving, "_on_rank_zero", "writing", "written")
around(last, "capture_exchange", "remembering", "remembered")

model, optimizer, scheduler, loader = es.prepare(*make(), loader)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
        if es.step() == 6:
            es.checkpoint()
es.barrier()
compare(model, optimizer, loader.seed)
folder = pathlib.Path(os.environ["EVENSTEP_CHECKPOINT_DIR"])
es.checkpoint(folder / "last")  # waits for what is being written
found = [es.load_checkpoint(path)["step"] for path in sorted(folder.glob("step-????????"))]
print("whole checkpoints of steps", found, flush=True)
"""
)

# Rank 0 waits for rank 2 in a group of both, while rank 2 hears that rank 1 is lost.
OWN_GROUPS = (
    HALF_COMMITTED.replace("import torch\n", "import torch\nimport torch.distributed as dist\n", 1)
    .replace(
        "model, optimizer, scheduler, loader = es.prepare",
        """es.barrier()
own = dist.new_group([0, 2])
ended = 0
model, optimizer, scheduler, loader = es.prepare""",
    )
    .replace(
        "        passes += 1\n",
        """        passes += 1
        if own is not None and rank != "1":
            both = torch.ones(1)
            try:
                dist.all_reduce(both, group=own)
                assert float(both) == 2.0
            except es.EvenstepError as error:
                assert error.status in ("EVEN_ERR_REVOKED", "EVEN_ERR_PEER_LOST"), error.status
                own, ended = None, ended + 1
""",
    )
    .replace("""made {passes} passes""", """made {passes} passes, ended {ended} group""")
)
