"""A small BERT that learns to fill in missing bytes of Python source: the text of the standard library.

Plain PyTorch; the lines of Evenstep are `import evenstep as es`, `es.prepare(…)`, and `es.set_weight(…)`: the loss is a mean over
the bytes left out, of which each rank's part of a batch has its own number.

    python examples/byte_bert.py                    one process
    torchrun --nproc-per-node 2 examples/byte_bert.py
    evenstep run -n 2 examples/byte_bert.py         balanced, watched, restartable
"""

import argparse
import pathlib
import sysconfig
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, RandomSampler

import evenstep as es

MASK = 256  # the word in the place of a byte that is left out
LEFT_OUT = 0.15


def standard_library_text(limit: int) -> torch.Tensor:
    """The first `limit` bytes of Python's standard library, as byte values."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Passages(Dataset):
    """Every passage of `length` bytes, and which of them are to be left out: the same ones whenever it is asked for."""

    def __init__(self, text: torch.Tensor, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return len(self.text) - self.length + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        gone = torch.rand(self.length, generator=generator) < LEFT_OUT
        return self.text[index : index + self.length].long(), gone


class BERT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int):
        super().__init__()
        self.words = nn.Embedding(257, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 256))
        for weight in (self.words.weight, self.places.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.words(words) + self.places.weight[: words.shape[1]]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch", type=int, default=32, help="global batch: passages a step, all ranks together")
    parser.add_argument("--length", type=int, default=64, help="bytes in a passage")
    parser.add_argument("--model", choices=["own", "bert"], default="own", help="bert: evenstep.models.BERT, BERT-base")
    parser.add_argument("--layers", type=int, help="default 4, of bert 12")
    parser.add_argument("--width", type=int, help="default 128, of bert 768")
    parser.add_argument("--heads", type=int, help="default 4, of bert 12")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (each rank takes its LOCAL_RANK's device)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes a rank")
    parser.add_argument("--text-bytes", type=int, default=4_000_000, help="how much of the library to read")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters here (rank 0)")
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> nn.Module:
    usual = (4, 128, 4) if args.model == "own" else (12, 768, 12)
    layers, width, heads = (given or size for given, size in zip((args.layers, args.width, args.heads), usual))
    if args.model == "own":
        return BERT(layers, width, heads, args.length)
    # without dropout, which draws other numbers where a batch is split otherwise
    return es.models.BERT(layers=layers, width=width, heads=heads, dropout=0.0)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", es.local_rank() % torch.cuda.device_count())
    dataset = Passages(standard_library_text(args.text_bytes), args.length)
    sampler = RandomSampler(dataset, num_samples=args.steps * args.batch)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    model = model_of(args).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    model, optimizer, loader = es.prepare(model, optimizer, loader)

    parameters = sum(p.numel() for p in model.parameters())
    es.print(f"BERT with {parameters:,} parameters, {args.steps} steps of {args.batch} passages of {args.length} bytes")
    began = time.perf_counter()
    for step, (words, gone) in enumerate(loader, start=es.step() + 1):
        words, gone = words.to(device), gone.to(device)
        losses = functional.cross_entropy(
            model(words.masked_fill(gone, MASK)).flatten(0, 1), words.flatten(), reduction="none"
        )
        count = int(gone.sum())
        loss = (losses * gone.flatten()).sum() / max(1, count)
        optimizer.zero_grad()
        weight = es.set_weight(count)  # 0 on a rank without samples, which has a dummy one
        loss.backward()
        optimizer.step()
        if step % args.print_every == 0 or step == args.steps:
            mean = es.reduce_mean(loss.detach(), weight=weight)
            es.print(f"step {step:5d}  loss {mean:.4f}  {time.perf_counter() - began:6.1f} s")
    if args.save and es.is_main():
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
