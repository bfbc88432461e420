"""The small training of the benches that start jobs, as the text that their scripts begin with."""

# In fp64, so that jobs with and without a fault can be compared at their end. `work(ms)`: the time of a larger model, at work.
SETUP = """
import os, pathlib, sys, time
import torch
import evenstep as es

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 32), torch.randn(4096, 8))
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.Tanh(), torch.nn.Linear(256, 8))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model, optimizer, loader = es.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=64, shuffle=True))

def work(ms):
    end = time.perf_counter() + ms / 1e3
    while time.perf_counter() < end:
        pass

def step(batch, ms):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[1])
    work(ms)
    loss.backward()
    optimizer.step()
"""
