"""Scripts whose gradients go other ways than one sum, whose ranks kill themselves where a test says, and which compare with the same
computed by one process; argv[2]: the form, argv[3]: steps before which one waits until somebody can join."""

from __future__ import annotations

from generation_cases import HEAD
from recovery_form_cases import _START
from recovery_loop_cases import WAITING

# Gradients that are encoded, of low rank, or added up by Adasum, "lateN" also N steps later; "none": as they are, of unequal shares;
# "sum": the same of losses that are sums over samples.
# argv[4]: of how many rounds whose samples they are, and who gives to them: "0.1.2*5,0.1.2>1.2*1,1.2*12".
EXCHANGED = (
    _START.replace("torch.float64", "torch.float32")
    + """
from evenstep.compression import encoding_of, parse_compression
from evenstep.powersgd_engine import PowerSGDEngine
from evenstep.shares import equal_shares

PowerSGDEngine.PLAIN_STEPS = 4
when, _, kind = form.rpartition(" ")
late = int(when[4:] or 1) if when else 0
how = {"reduction": kind} if kind in ("adasum", "sum") else {"compression": kind}
SPLIT = [5, 4, 2, 1]
unequal, each = kind in ("none", "sum"), 0.05  # of a sum, what a sample counts
how |= {"shares": lambda number, batch: SPLIT} if unequal else {"policy": "equal"}
rows = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 16))
loader = torch.utils.data.DataLoader(rows, batch_size=BATCH)


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 16, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


model, optimizer, loader = es.prepare(*make(), loader, sync=es.Stale(late) if late else None, **how)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        wait_for_somebody()
        optimizer.zero_grad()
        loss = loss_of(model, batch) * (each * len(batch[0]) if kind == "sum" else 1)
        here("forward")
        loss.backward()
        here("backward")
        optimizer.step()
        here("applied")
es.barrier()


class Plain:
    def total(self, given):
        return sum(given.values())


class Encoded:
    def __init__(self):
        self.encoding, self.left = encoding_of(parse_compression(kind)), {}

    def total(self, given):
        whole = 0
        for one, values in given.items():
            values, sent = values.reshape(-1) + self.left.get(one, 0), torch.zeros(values.numel())
            self.encoding.add(self.encoding.encode(values, 0), sent)
            self.left[one] = values - sent
            whole = whole + sent
        return whole.view(16, 6)


class LowRank:
    # torch's powerSGD_hook, of one matrix
    def __init__(self):
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

        self.orthogonalize = lambda one: _orthogonalize(one, 1e-8)
        self.left, self.q, self.rounds, self.ranks = {}, None, 0, 0

    def total(self, given):
        import numpy

        n, self.rounds = len(given), self.rounds + 1
        if self.rounds <= PowerSGDEngine.PLAIN_STEPS:
            return sum(given.values())
        self.left = {one: values * (n / self.ranks) for one, values in self.left.items()}
        self.ranks = n
        brought = {one: n * values + self.left.get(one, 0) for one, values in given.items()}
        if self.q is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(numpy.random.RandomState(0).randint(1_000_000_000))
                self.q = torch.randn(1, 6, 1)
        self.orthogonalize(self.q)
        p = sum(values.unsqueeze(0) @ self.q for values in brought.values())
        self.orthogonalize(p)
        self.q = sum(values.t().unsqueeze(0) @ p for values in brought.values()) / n
        found = (p @ self.q.transpose(1, 2))[0]
        self.left = {one: values - found for one, values in brought.items()}
        return found


class Adaptive:
    def total(self, given):
        sums = [(len(given) * values, 1) for values in given.values()]
        while len(sums) > 1:
            pairs, odd = list(zip(sums[::2], sums[1::2])), sums[len(sums) // 2 * 2 :]
            sums = []
            for (a, m), (b, n) in pairs:
                both, aa, bb = float((a * b).sum()), float((a * a).sum()), float((b * b).sum())
                sums.append(((1 - m / (m + n) * both / aa) * a + (1 - n / (m + n) * both / bb) * b, m + n))
            sums += odd
        return sums[0][0]


def rounds():
    for part in sys.argv[4].split(","):
        ranks, count = part.split("*")
        sliced, _, gave = ranks.partition(">")
        for _ in range(int(count)):
            yield sliced.split("."), (gave or sliced).split(".")


plain, its_optimizer = make()
ways = {"none": Plain, "sum": Plain, "adasum": Adaptive, "powersgd": LowRank}
adds = ways.get(kind.partition(":")[0], Encoded)()
due = []
for number, (sliced, gave) in enumerate(rounds()):
    batch = rows[number * BATCH % 72 : number * BATCH % 72 + BATCH]
    given, at = {}, 0
    parts = dict(zip(sliced, SPLIT if unequal and len(sliced) == 4 else equal_shares(BATCH, len(sliced))))
    whole = sum(parts.get(one, 0) for one in gave)
    for one, count in parts.items():
        plain.zero_grad()
        loss_of(plain, [values[at : at + count] for values in batch]).backward()
        at += count
        given[one] = plain.weight.grad * (each * count if kind == "sum" else count / whole)
    due.append(adds.total({one: given.get(one, torch.zeros(16, 6)) for one in gave}))
    if len(due) > late:
        plain.weight.grad = due.pop(0)
        its_optimizer.step()
say(model, flat(plain))
print("bits", flat(model).numpy().tobytes().hex(), flush=True)
"""
)


def over_gloo(source: str) -> str:
    """The same with the engines of torch's process groups."""
    points = """from evenstep.exchange import TorchExchange

around(TorchExchange, "all_reduce", "summing", "summed")
around(TorchExchange, "gather", "gathering", "gathered")
"""
    prepared = "model, optimizer, loader = es.prepare("
    assert source.count("**how)") == source.count(prepared) == 1
    return source.replace("**how)", "engine='torch', **how)").replace(prepared, points + prepared)


# Samples that cannot be read; the ranks tell one another of them before each batch.
UNREADABLE = (
    HEAD.replace("import copy, os, sys", "import copy, os, sys, time")
    + WAITING
    + """
from evenstep.unreadable import Unreadable

waits = [int(step) for step in sys.argv[2].split(",") if step]
around(Unreadable, "_counts", "counting", "counted")
BAD = {3, 9, 17, 18, 19, 40, 66, 71}


class Damaged(torch.utils.data.Dataset):
    def __len__(self):
        return len(data)

    def __getitem__(self, index):
        if index in BAD:
            raise OSError(5, f"block {index} is damaged")
        return data[index]


per_step = int(sys.argv[3])
loader = torch.utils.data.DataLoader(Damaged(), batch_size=BATCH, shuffle=True)
model, optimizer, scheduler, loader = es.prepare(*make(), loader, skip_unreadable=True)
for epoch in es.epochs(EPOCHS):
    for number, batch in enumerate(loader):
        wait_for_somebody()
        loss = loss_of(model, batch) / per_step
        here("forward")
        if (number + 1) % per_step:
            with es.no_sync():
                loss.backward()
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        here("applied")
        scheduler.step()
es.barrier()
other, its, rates = make()
for epoch in range(EPOCHS):
    for number, indices in enumerate(GlobalOrder(loader.loader, 1).batches(loader.seed, epoch)):
        good = [index for index in indices if index not in BAD]
        (loss_of(other, [torch.stack(part) for part in zip(*(data[i] for i in good))]) / per_step).backward()
        if (number + 1) % per_step == 0:
            its.step()
            its.zero_grad()
            rates.step()
flat = lambda one: torch.cat([p.detach().reshape(-1) for p in one.parameters()])
far = float((flat(model) - flat(other)).norm() / flat(other).norm())
same = optimizer.param_groups[0]["lr"] == its.param_groups[0]["lr"]
print(f"rank {rank} of {es.world_size()} at step {es.step()}: {far:.1e} apart, rate {'kept' if same else 'other'}", flush=True)
"""
)

# A global batch that follows the noise of the gradients. argv[2]: steps before which one waits.
ADAPTED = (
    HEAD.replace("import copy, os, sys", "import copy, os, sys, time")
    + WAITING
    + """
from evenstep.batch_noise import NoiseProbe

waits = [int(step) for step in sys.argv[2].split(",") if step]
around(NoiseProbe, "exchanged", "measuring", "measured")
torch.manual_seed(3)
x = torch.randn(600, 6)
y = x @ torch.arange(6.0).unsqueeze(1) + 60 * torch.randn(600, 1)
rows = torch.utils.data.TensorDataset(x, y)


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)


loader = torch.utils.data.DataLoader(rows, batch_size=12, shuffle=True)
adapt = es.AdaptBatch(most=48, lr_rule="linear", every=3)
model, optimizer, scheduler, loader = es.prepare(*make(), loader, adapt_batch=adapt, policy="equal")
if "half" in sys.argv:  # rank 2 comes out of no commit while rank 0 does, and decides before it hears of the loss


    def comes_out():
        if rank == "0":
            open("out", "w").close()
        while rank == "1" and not os.path.exists("out"):
            time.sleep(0.005)

    dies_in_the_meeting(step=5, comes_out=comes_out)
had = []
for epoch in es.epochs(2):
    for batch in loader:
        wait_for_somebody()
        now = epoch, es.session().steps.last_plan.total, es.session().rates.factor
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        optimizer.step()
        if not es.session().redoing:
            had.append(now)
        here("applied")
        scheduler.step()
ranks = es.world_size()
es.barrier()  # who has joined ends soon after it
flat = lambda one: torch.cat([p.detach().reshape(-1) for p in one.parameters()])
if len(had) == es.step():  # else it has joined
    other, its, rates = make()
    for epoch in range(2):
        one_by_one = torch.utils.data.DataLoader(rows, batch_size=1, shuffle=True)
        order = [index for (index,) in GlobalOrder(one_by_one, 1).batches(loader.seed, epoch)]
        for _, size, factor in [one for one in had if one[0] == epoch]:
            indices, order = order[:size], order[size:]
            for group in its.param_groups:
                group["lr"] *= factor
            its.zero_grad()
            loss_of(other, rows[indices]).backward()
            its.step()
            for group in its.param_groups:
                group["lr"] /= factor
            rates.step()
        assert not order
    far = float((flat(model) - flat(other)).norm() / flat(other).norm())
    print(f"rank {rank}: {far:.1e} apart after {[size for _, size, _ in had]}", flush=True)
print(f"rank {rank} of {ranks} at step {es.step()}: bits {flat(model).numpy().tobytes().hex()}", flush=True)
"""
)

# Goes back to a checkpoint once, in the midst of an epoch.
LOADING = (
    HEAD
    + """
import importlib

from evenstep import checkpoint_state

around(importlib.import_module("evenstep.checkpoint"), "_agree", "agreeing", "agreed")
around(checkpoint_state, "on_all_ranks", "reading", "read")
model, optimizer, scheduler, loader = es.prepare(*make(), loader)
folder = os.path.join(os.environ["EVENSTEP_CHECKPOINT_DIR"], "own")
saved = loaded = False
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        optimizer.step()
        scheduler.step()
        if es.step() == 8 and not saved:
            saved = True
            es.checkpoint(folder)
        if es.step() == 10 and not loaded:
            loaded = True
            facts = es.load_checkpoint(folder)
            assert facts["step"] == es.step() == 8
            here("loaded")
es.barrier()
compare(model, optimizer, loader.seed)
"""
)
