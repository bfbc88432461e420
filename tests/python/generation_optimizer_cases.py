"""Scripts with two optimizers, whose ranks kill themselves where a test says, and compare what is left with one process at their end."""

from __future__ import annotations

from generation_cases import HEAD

# Two optimizers, of which the second steps on gradients that the first one's step is in; both models have BatchNorm.
ADVERSARIAL = (
    HEAD
    + """
torch.manual_seed(3)
noise = torch.randn(72, 3)
data = torch.utils.data.TensorDataset(data.tensors[0], noise)
loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True)


def make_both():
    torch.manual_seed(1)
    generator = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 6))
    critic = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-2, eps=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-2, eps=1e-3)
    rates = [torch.optim.lr_scheduler.StepLR(one, 4, 0.8) for one in (of_generator, of_critic)]
    return [generator, critic, of_generator, of_critic, *rates]


def train_on(batch, generator, critic, of_generator, of_critic, its_rate, critics_rate, here=lambda point: None):
    true, noise = batch
    false = generator(noise)
    of_critic.zero_grad()
    loss = (critic(true) - 1).square().mean() + critic(false.detach()).square().mean()
    here("judged")
    loss.backward()
    of_critic.step()
    critics_rate.step()
    here("first")
    of_generator.zero_grad()
    loss = (critic(false) - 1).square().mean()
    here("fooled")
    loss.backward()
    here("ready")
    of_generator.step()
    here("second")
    its_rate.step()


*both, loader = es.prepare(*make_both(), loader)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        train_on(batch, *both, here=here)
es.barrier()
plain = make_both()
for epoch in range(EPOCHS):
    for indices in GlobalOrder(loader.loader, 1).batches(loader.seed, epoch):
        train_on([torch.stack(part) for part in zip(*(data[i] for i in indices))], *plain)


def state_of(objects):
    values = [v for one in objects[:2] for v in (*one.parameters(), *one.buffers())]
    return torch.cat([value.detach().double().reshape(-1) for value in values])


far = float((state_of(both) - state_of(plain)).norm() / state_of(plain).norm())
same = all(one.state_dict() == its.state_dict() for one, its in zip(both[4:], plain[4:]))
print(f"rank {rank} of {es.world_size()} at step {es.step()}: {far:.1e} apart, rate {'kept' if same else 'other'}", flush=True)
"""
)

# Two optimizers that step on the gradients of one backward.
SHARED = (
    HEAD
    + """
class Both:
    def __init__(self, *optimizers):
        self.optimizers, self.param_groups = optimizers, optimizers[0].param_groups

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()
            here("applied")

    def zero_grad(self):
        for optimizer in self.optimizers:
            optimizer.zero_grad()


def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    first, second = (torch.optim.Adam(part.parameters(), lr=1e-2) for part in (model[0], model[2]))
    return model, Both(first, second), torch.optim.lr_scheduler.StepLR(first, 4, 0.8)


model, optimizer, scheduler = make()
model, scheduler, loader, *_ = es.prepare(model, scheduler, loader, *optimizer.optimizers)
for epoch in es.epochs(EPOCHS):
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()
es.barrier()
torch.manual_seed(0)
deaths.clear()
compare(model, optimizer, loader.seed)
"""
)
