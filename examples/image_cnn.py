"""A small residual CNN with BatchNorm that learns to tell shapes apart: discs, squares, rings, crosses, in noise.

Plain PyTorch; the lines of Evenstep are `import evenstep as es`, `es.prepare(…)` and `es.evaluate(…)`. BatchNorm's statistics are
those of the whole global batch, so the CNN trains as on one device.

    python examples/image_cnn.py                    one process
    torchrun --nproc-per-node 2 examples/image_cnn.py
    evenstep run -n 2 examples/image_cnn.py         balanced, watched, restartable
"""

import argparse
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import evenstep as es

SHAPES = ("disc", "square", "ring", "cross")


class Drawings(Dataset):
    """Images of 1 × side × side that depend on their number alone, with the number of the shape."""

    def __init__(self, count: int, side: int, first: int = 0):
        self.count, self.side, self.first = count, side, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        x, y, radius = (float(part) for part in torch.rand(3, generator=generator))
        line = torch.linspace(-1, 1, self.side)
        across, down = (line - 0.6 * (x - 0.5))[None, :], (line - 0.6 * (y - 0.5))[:, None]
        size, label = 0.35 + 0.25 * radius, index % len(SHAPES)
        distance = (across.square() + down.square()).sqrt()
        if SHAPES[label] == "disc":
            inside = distance < size
        elif SHAPES[label] == "square":
            inside = torch.maximum(across.abs(), down.abs()) < size
        elif SHAPES[label] == "ring":
            inside = (distance < size) & (distance > 0.6 * size)
        else:
            inside = (torch.minimum(across.abs(), down.abs()) < 0.25 * size) & (distance < size)
        image = inside.float() + 0.5 * torch.randn(self.side, self.side, generator=generator)
        return image[None], label


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(inner)))


class CNN(nn.Module):
    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.blocks = nn.Sequential(*(nn.Sequential(nn.MaxPool2d(2), Residual(width)) for _ in range(blocks)))
        self.head = nn.Linear(width, len(SHAPES))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="after five 97%% of other images are right")
    parser.add_argument("--images", type=int, default=2048, help="in an epoch; a quarter as many to evaluate on")
    parser.add_argument("--batch", type=int, default=64, help="global batch: images a step, all ranks together")
    parser.add_argument("--side", type=int, default=32, help="pixels")
    parser.add_argument(
        "--model", choices=["own", "simplecnn"], default="own", help="simplecnn: evenstep.models.SimpleCNN"
    )
    parser.add_argument("--width", type=int, help="channels; default 16, of simplecnn's first convolution 32")
    parser.add_argument("--blocks", type=int, default=2, help="simplecnn has three")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (each rank takes its LOCAL_RANK's device)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes a rank")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters here (rank 0)")
    return parser.parse_args()


def model_of(args: argparse.Namespace) -> nn.Module:
    if args.model == "own":
        return CNN(args.width or 16, args.blocks)
    return es.models.SimpleCNN(len(SHAPES), channels=1, width=args.width or 32)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", es.local_rank() % torch.cuda.device_count())
    images = Drawings(args.images, args.side)
    others = Drawings(args.images // 4, args.side, first=args.images)
    loader = DataLoader(images, batch_size=args.batch, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(others, batch_size=args.batch)
    model = model_of(args).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    model, optimizer, loader = es.prepare(model, optimizer, loader)
    test_loader = es.prepare(test_loader, train=False)

    def right(net: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (net(batch[0].to(device)).argmax(dim=1) == batch[1].to(device)).float().mean()

    parameters = sum(p.numel() for p in model.parameters())
    es.print(f"CNN with {parameters:,} parameters, {args.epochs} epochs of {args.images} images, {args.batch} a step")
    began = time.perf_counter()
    for epoch in es.epochs(args.epochs):
        model.train()
        for pictures, labels in loader:
            loss = functional.cross_entropy(model(pictures.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            batch = es.session().latest
        weight = len(labels) if batch is None or batch.samples else 0  # a rank without samples has a dummy one
        mean = es.reduce_mean(loss.detach(), weight=weight)
        accuracy = es.evaluate(model, test_loader, right)
        es.print(
            f"epoch {epoch}  loss {mean:.4f}  {accuracy:.1%} of {len(others)} other images right  "
            f"{time.perf_counter() - began:6.1f} s"
        )
    if args.save and es.is_main():
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
