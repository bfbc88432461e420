"""What scripts of several tests have in common, as text to be put into them."""

from __future__ import annotations

# session.telemetry = Events(session.telemetry): what is told of events, in `told`, too
EVENTS = """
class Events:
    def __init__(self, inner):
        self.inner, self.told = inner, []

    def event(self, kind, step, value=0, words=""):
        self.told.append((kind, value, words))
        self.inner.event(kind, step, value, words)

    def __getattr__(self, name):
        return getattr(self.inner, name)
"""

# agent(): the process of the job's agent, 0 while there is none; needs the page.
AGENT = """
import json, os

def agent():
    try:
        with open(os.environ["EVENSTEP_RUN_DIR"] + "/agent.json") as file:
            return json.load(file)["pid"]
    except (OSError, ValueError):  # it is being written
        return 0
"""

# Trains on its ranks, and says how far that is from one process; `epochs`: what the loop goes over.
TRAINING = """
import os, sys
import torch
import evenstep as es

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))


def train(prepare, epochs):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for _ in epochs:
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def train_and_compare(epochs=range(3)):
    together, alone = train(es.prepare, epochs), train(lambda *parts: parts, range(3))
    apart = max(float((a - b).abs().max()) for a, b in zip(together, alone))
    print(f"apart {apart:.1e} after {es.step()} steps", flush=True)

"""
