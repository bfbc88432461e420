"""A small CNN with BatchNorm whose parameters come out the same to the last bit on any number of ranks, with any shares.

es.Trainer owns the loop: it computes each batch in blocks that are the same whoever computes them, and adds up in one order.

    python examples/bitwise.py                                      one process
    evenstep run -n 2 --cpu-quota 1:0.25 examples/bitwise.py        the same bits, also where a rank is killed meanwhile
"""

import argparse
import zlib

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import evenstep as es


def train_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The loss alone: the Trainer calls backward and steps."""
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def bits(model: nn.Module) -> str:
    """A checksum of the parameters and buffers: another one where a single bit is."""
    checksum = 0
    for tensor in model.state_dict().values():
        checksum = zlib.crc32(bytes(tensor.reshape(-1).view(torch.uint8).tolist()), checksum)
    return f"{checksum:08x}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--images", type=int, default=1024, help="made-up ones")
    parser.add_argument("--batch", type=int, default=64, help="global batch: images a step, all ranks together")
    parser.add_argument("--side", type=int, default=16, help="pixels")
    parser.add_argument("--width", type=int, default=8, help="channels of the first convolution")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--print-every", type=int, default=8)
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters here (rank 0)")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    loader = DataLoader(es.data.SyntheticImages(args.images, side=args.side), batch_size=args.batch, shuffle=True)
    model = es.models.SimpleCNN(width=args.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    def say(trainer: es.Trainer) -> None:
        if trainer.step % args.print_every == 0:
            es.print(f"step {trainer.step:5d}  loss {trainer.loss:.4f}")

    # as many threads everywhere: other numbers of them add up in other orders
    config = es.Config(exact="bitwise", threads=1)
    es.Trainer(model, optimizer, train_step, on_step=say, config=config).fit(loader, epochs=args.epochs)

    es.print(f"bits {bits(model)}")
    if args.save and es.is_main():
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
