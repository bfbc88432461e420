"""A small GPT that learns to write Python from the source text of the standard library.

Plain PyTorch; the two lines of Evenstep are `import evenstep as es` and `es.prepare(…)`
(`es.print` and `es.reduce_mean` only make the printed loss that of all ranks).

    python examples/char_gpt.py                    one process
    torchrun --nproc-per-node 2 examples/char_gpt.py
    evenstep run -n 2 examples/char_gpt.py         balanced, watched, restartable
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


def standard_library_text(limit: int) -> torch.Tensor:
    """The first `limit` bytes of Python's standard library, as byte values."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(root.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


class Windows(Dataset):
    """Every window of `length` bytes, with the same window moved on by one as its target."""

    def __init__(self, text: torch.Tensor, length: int):
        self.text, self.length = text, length

    def __len__(self) -> int:
        return len(self.text) - self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = self.text[index : index + self.length + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int):
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.tokens.weight  # tied
        for weight in (self.tokens.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps (default 200)")
    parser.add_argument("--batch", type=int, default=32, help="global batch: windows a step, all ranks together")
    parser.add_argument("--length", type=int, default=64, help="bytes in a window")
    parser.add_argument(
        "--model", choices=["own", "gpt2"], default="own", help="gpt2: evenstep.models.GPT2, GPT-2 small"
    )
    parser.add_argument("--layers", type=int, help="default 4, of gpt2 12")
    parser.add_argument("--width", type=int, help="default 128, of gpt2 768")
    parser.add_argument("--heads", type=int, help="default 4, of gpt2 12")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--dtype", choices=["float32", "float64", "bfloat16"], default="float32")
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
        return GPT(layers, width, heads, args.length)
    # without dropout, which draws other numbers where a batch is split otherwise
    return es.models.GPT2(layers=layers, width=width, heads=heads, dropout=0.0)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", es.local_rank() % torch.cuda.device_count())
    dataset = Windows(standard_library_text(args.text_bytes), args.length)
    sampler = RandomSampler(dataset, num_samples=args.steps * args.batch)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler, num_workers=args.workers)
    model = model_of(args).to(device, getattr(torch, args.dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    model, optimizer, loader = es.prepare(model, optimizer, loader)

    parameters = sum(p.numel() for p in model.parameters())
    es.print(f"GPT with {parameters:,} parameters, {args.steps} steps of {args.batch} windows of {args.length} bytes")
    began = time.perf_counter()
    for step, (tokens, targets) in enumerate(loader, start=es.step() + 1):
        logits = model(tokens.to(device))
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.print_every == 0 or step == args.steps:
            mean = es.reduce_mean(loss.detach())
            es.print(f"step {step:5d}  loss {mean:.4f}  {time.perf_counter() - began:6.1f} s")
    if args.save and es.is_main():
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
