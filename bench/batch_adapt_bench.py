"""What `es.AdaptBatch` gains: samples, steps and seconds until a small GPT's validation loss is low enough, with fixed global
batches and with one that follows the noise of the gradients.

    python bench/batch_adapt_bench.py [--rounds 3] [--target 2.0] [--ranks 2] [--program PATH]

All start from the same learning rate at the least batch; a fixed larger batch has it times the root of how much larger it is,
as the adapted one has ("sqrt", for Adam). The variants take turns, each round with another seed; a time is that of the training
steps alone, without the validation between them. A variant that does not come to the target within --most samples says so.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from heading import print_heading

SCRIPT = """
import json, math, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from torch.nn import functional
from torch.utils.data import DataLoader
import evenstep as es
from char_gpt import GPT, Windows, standard_library_text

how = json.loads(sys.argv[2])
torch.set_num_threads(1)
torch.manual_seed(how["seed"])
text = standard_library_text(1_000_000)
windows, held = Windows(text[:900_000], 64), Windows(text[900_000:], 64)
model = GPT(layers=2, width=96, heads=4, length=64)
adapt = es.AdaptBatch(most=how["most"], lr_rule="sqrt", every=50) if how["most"] else None
rate = how["rate"] * math.sqrt(how["batch"] / how["least"])
optimizer = torch.optim.Adam(model.parameters(), lr=rate)
loader = DataLoader(windows, batch_size=how["batch"], shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader, adapt_batch=adapt)
places = torch.arange(0, len(held), len(held) // 128)[:128]
tokens = torch.stack([held[int(i)][0] for i in places])
wanted = torch.stack([held[int(i)][1] for i in places])


def loss_of(tokens, wanted):
    return functional.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def validate():
    model.eval()
    with torch.no_grad():
        loss = es.reduce_mean(loss_of(tokens, wanted))
    model.train()
    return float(loss)


samples = steps = 0
spent, due, loss = 0.0, 0, math.inf
began = time.perf_counter()
for batch in loader:
    optimizer.zero_grad()
    loss_of(*batch).backward()
    optimizer.step()
    samples, steps = samples + loader.batch_size, steps + 1
    if samples >= due:
        spent += time.perf_counter() - began
        due = samples + how["look"]
        loss = validate()
        if loss <= how["target"] or samples >= how["samples"]:
            break
        began = time.perf_counter()
if es.is_main():
    print("RESULT", json.dumps(dict(seconds=spent, samples=samples, steps=steps, loss=loss, batch=loader.batch_size)), flush=True)
"""


def train(options: argparse.Namespace, folder: pathlib.Path, batch: int, most: int, seed: int) -> dict[str, float]:
    how = {
        "seed": seed,
        "batch": batch,
        "most": most,
        "least": options.least,
        "rate": options.rate,
        "target": options.target,
        "samples": options.samples,
        "look": options.look,
    }
    examples = pathlib.Path(__file__).resolve().parent.parent / "examples"
    words = [options.program, "run", "-n", str(options.ranks), "--no-monitor", "--python", sys.executable]
    words += [str(folder / "train.py"), str(examples), json.dumps(how)]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    for line in ended.stdout.splitlines():
        if "RESULT" in line:
            result: dict[str, float] = json.loads(line.split("RESULT ", 1)[1])
            return result
    sys.exit(f"a training has failed:\n{ended.stdout}{ended.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--target", type=float, default=2.0, help="validation loss, nats a byte")
    parser.add_argument("--least", type=int, default=16, help="the smallest global batch")
    parser.add_argument("--most", type=int, default=256, help="the largest one")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate at the smallest")
    parser.add_argument("--samples", type=int, default=400_000, help="given up after so many")
    parser.add_argument("--look", type=int, default=2048, help="samples between two validations")
    found = pathlib.Path(sys.executable).parent / "evenstep"
    parser.add_argument("--program", default=os.environ.get("EVENSTEP_PROGRAM") or str(found))
    options = parser.parse_args()

    middle = int((options.least * options.most) ** 0.5)
    variants = {f"fixed {batch}": (batch, 0) for batch in (options.least, middle, options.most)}
    variants[f"adapted {options.least} to {options.most}"] = (options.least, options.most)
    print_heading(f"Until a validation loss of {options.target}: fixed global batches, and one that follows the noise")
    folder = pathlib.Path(tempfile.mkdtemp())
    results: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    try:
        (folder / "train.py").write_text(SCRIPT)
        for seed in range(options.rounds):
            for name, (batch, most) in variants.items():
                results[name].append(train(options, folder, batch, most, seed))
                print(f"  round {seed}: {name}: {json.dumps(results[name][-1])}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{'batch':20} {'seconds':>9} {'samples':>9} {'steps':>7} {'last batch':>10}  came to the target")
    for name, rounds in results.items():
        middles = [statistics.median(one[key] for one in rounds) for key in ("seconds", "samples", "steps", "batch")]
        came = sum(one["loss"] <= options.target for one in rounds)
        print(
            f"{name:20} {middles[0]:9.1f} {middles[1]:9.0f} {middles[2]:7.0f} {middles[3]:10.0f}  {came} of {len(rounds)}"
        )


if __name__ == "__main__":
    main()
