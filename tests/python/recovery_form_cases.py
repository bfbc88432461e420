"""Scripts with other forms of training than one plain gradient a step, whose ranks kill themselves where a test says; each compares
with one process at its end. argv[2]: the form, argv[3]: steps before which one waits until somebody can join."""

from __future__ import annotations

from generation_cases import HEAD
from recovery_loop_cases import WAITING

_OWN = """
form = sys.argv[2]
waits = [int(step) for step in sys.argv[3].split(",") if step]


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def say(model, wanted, same=True):
    far = float((flat(model) - wanted).norm() / wanted.norm())
    rate = "kept" if same else "other"
    print(f"rank {rank} of {es.world_size()} at step {es.step()}: {far:.1e} apart, rate {rate}", flush=True)
"""

_START = HEAD.replace("import copy, os, sys", "import copy, os, sys, time") + WAITING + _OWN

# A closure, which LBFGS makes several times a step; with a split of the script's own, of three ranks.
CLOSURE = (
    _START
    + """
SPLIT = [6, 4, 2]
used = set()


def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    if form == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    else:
        search = "strong_wolfe" if form == "wolfe" else None
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, history_size=3, line_search_fn=search)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.8)


def train_on(batch, model, optimizer, scheduler, mean=lambda loss: loss, here=lambda point: None):
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here(f"forward{calls}")
        loss.backward()
        here(f"backward{calls}")
        return mean(loss)

    optimizer.step(closure)
    here("applied")
    scheduler.step()


*made, loader = es.prepare(*make(), loader, shares=lambda number, batch: SPLIT)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        wait_for_somebody()
        train_on(batch, *made, es.reduce_mean if form == "wolfe" else lambda loss: loss, here)
        if not es.session().redoing:
            used.add(tuple(es.session().steps.last_plan.shares))
es.barrier()
plain = make()
for epoch in range(EPOCHS):
    for indices in GlobalOrder(loader.loader, 1).batches(loader.seed, epoch):
        train_on([torch.stack(part) for part in zip(*(data[i] for i in indices))], *plain)
say(made[0], flat(plain[0]), made[2].state_dict() == plain[2].state_dict())
print(f"rank {rank} used {sorted(used)}", flush=True)
"""
)

# Batches of twelve equal samples: whoever has however many of them comes to the same gradient, also by itself.
_EQUAL_SAMPLES = """
from evenstep.engine import SharedEngine

around(SharedEngine, "finish", "adding", "added")
rows = torch.utils.data.TensorDataset(
    torch.randn(6, 6).repeat_interleave(BATCH, 0), torch.randn(6, 2).repeat_interleave(BATCH, 0)
)
loader = torch.utils.data.DataLoader(rows, batch_size=BATCH)


def batches():
    for _ in range(EPOCHS):
        for number in range(6):
            yield rows[number * BATCH : (number + 1) * BATCH]
"""

# Ranks that train on their own, or with late gradients.
MODES = (
    _START
    + _EQUAL_SAMPLES
    + """
kind, _, number = form.partition(":")
every = int(number)
mode = {"local": es.LocalSGD, "diloco": es.DiLoCo, "stale": es.Stale}[kind](every)


def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)


model, optimizer, loader = es.prepare(*make(), loader, sync=mode, policy="equal")
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        wait_for_somebody()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        optimizer.step()
        here("applied")
es.synchronise_models()
es.barrier()

plain, its_optimizer = make()
anchors = [p.detach().clone() for p in plain.parameters()]
outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
late = []
for number, batch in enumerate(batches()):
    its_optimizer.zero_grad()
    loss_of(plain, batch).backward()
    if kind == "stale":
        late.append([p.grad for p in plain.parameters()])
        due = late.pop(0) if len(late) > every else [None] * len(late[0])
        for p, gradient in zip(plain.parameters(), due):
            p.grad = gradient
    its_optimizer.step()
    if kind == "diloco" and (number + 1) % every == 0:
        with torch.no_grad():
            for anchor, p in zip(anchors, plain.parameters()):
                anchor.grad = anchor - p
            outer.step()
            for anchor, p in zip(anchors, plain.parameters()):
                p.copy_(anchor)
say(model, flat(plain))
"""
)

# Gradients that travel encoded; argv[4]: how many ranks make which steps, as "3*5,2*13".
COMPRESSED = (
    _START.replace("torch.float64", "torch.float32")
    + _EQUAL_SAMPLES
    + """
from evenstep.compression import WIRES, encoding_of, parse_compression


def make():
    torch.manual_seed(1)
    model = torch.nn.Linear(6, 2, bias=False)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


model, optimizer, loader = es.prepare(*make(), loader, compression=form, policy="equal")
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        wait_for_somebody()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        here("backward")
        optimizer.step()
        here("applied")
es.barrier()

plain, its_optimizer = make()
compression = parse_compression(form)
ranks = [int(n) for part in sys.argv[4].split(",") for n in [part.split("*")[0]] * int(part.split("*")[1])]
left = {}  # of each rank, the one that joined last among them
for n, batch in zip(ranks, batches()):
    its_optimizer.zero_grad()
    loss_of(plain, batch).backward()
    gradient = plain.weight.grad.reshape(-1)
    total = torch.zeros_like(gradient)
    left = {one: left.get(one, torch.zeros_like(gradient)) for one in range(n)}
    for one in left:
        values = gradient / n + left[one]
        if compression.name in WIRES:
            total += values.to(WIRES[compression.name]).float()
            continue
        encoding, sent = encoding_of(compression), torch.zeros_like(values)
        encoding.add(encoding.encode(values, 0), sent)
        total += sent
        left[one] = values - sent if encoding.feedback else left[one]
    plain.weight.grad.copy_(total.view_as(plain.weight))
    its_optimizer.step()
say(model, flat(plain))
print("bits", flat(model).numpy().tobytes().hex(), flush=True)
"""
)

# The same where each rank has other samples, more or fewer than the others. With an exchange after each step and no momentum that is
# what one process makes of whole batches.
UNEQUAL = (
    _START
    + """
import hashlib

from evenstep.engine import SharedEngine

around(SharedEngine, "finish", "adding", "added")
kind, _, number = form.partition(":")
mode = {"local": es.LocalSGD, "diloco": es.DiLoCo}[kind](int(number))


def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


model, optimizer, loader = es.prepare(*make(), loader, sync=mode, shares=lambda number, batch: [5, 4, 2, 1])
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        wait_for_somebody()
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        here("forward")
        loss.backward()
        optimizer.step()
        here("applied")
es.synchronise_models()
es.barrier()
plain, its_optimizer = make()
for epoch in range(EPOCHS):
    for indices in GlobalOrder(loader.loader, 1).batches(loader.seed, epoch):
        its_optimizer.zero_grad()
        loss_of(plain, [torch.stack(part) for part in zip(*(data[i] for i in indices))]).backward()
        its_optimizer.step()
say(model, flat(plain))
print("bits", hashlib.sha256(flat(model).numpy().tobytes()).hexdigest(), flush=True)
"""
)
