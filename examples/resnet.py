"""ResNet-50 (or a smaller one) on CIFAR-10 from local files, or on made-up images where there are none.

Plain PyTorch with a learning rate that warms up and falls, momentum and label smoothing; the lines of Evenstep are
`import evenstep as es`, `es.prepare(…)` and `es.evaluate(…)`. BatchNorm's statistics are those of the whole global batch.

    python examples/resnet.py --blocks 1,1,1 --width 8                        one process, made-up images
    evenstep run -n 2 examples/resnet.py --blocks 1,1,1 --width 8             balanced, watched, restartable
    evenstep run examples/resnet.py --cifar cifar-10-binary.tar.gz --device cuda --workers 4 --epochs 30 --batch 512
"""

import argparse
import math
import time

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import evenstep as es
from evenstep.data import CIFAR10, SyntheticImages
from evenstep.models import ResNet


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar", metavar="PLACE", help="CIFAR-10's binary version: a folder, or its .tar.gz")
    parser.add_argument("--images", type=int, default=2048, help="made-up ones, without --cifar")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64, help="global batch: images a step, all ranks together")
    parser.add_argument("--blocks", default="3,4,6,3", help="bottlenecks in each stage; the default is ResNet-50")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--lr", type=float, default=0.05, help="after the warm-up")
    parser.add_argument("--warm-up", type=int, default=10, help="steps")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda (each rank takes its LOCAL_RANK's device)")
    parser.add_argument("--workers", type=int, default=0, help="loader processes a rank")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--save", metavar="FILE", help="write the trained parameters here (rank 0)")
    return parser.parse_args()


def centred(image: torch.Tensor) -> torch.Tensor:
    """CIFAR-10's pixels, with about the mean 0 and the deviation 1."""
    mean, deviation = torch.tensor([0.491, 0.482, 0.447]), torch.tensor([0.247, 0.243, 0.262])
    return (image - mean[:, None, None]) / deviation[:, None, None]


def data_of(args: argparse.Namespace) -> tuple[Dataset, Dataset]:
    """To train on, and to evaluate on."""
    if args.cifar:
        return CIFAR10(args.cifar, transform=centred), CIFAR10(args.cifar, train=False, transform=centred)
    images = SyntheticImages(args.images + args.images // 4)
    cut = range(args.images, len(images))
    return torch.utils.data.Subset(images, range(args.images)), torch.utils.data.Subset(images, cut)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", es.local_rank() % torch.cuda.device_count())
    images, others = data_of(args)
    loader = DataLoader(images, batch_size=args.batch, shuffle=True, num_workers=args.workers, drop_last=True)
    test_loader = DataLoader(others, batch_size=args.batch, num_workers=args.workers)
    blocks = [int(count) for count in args.blocks.split(",")]
    model = ResNet(classes=10, blocks=blocks, width=args.width, small_images=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = args.epochs * len(loader)

    def rate(step: int) -> float:
        if step < args.warm_up:
            return (step + 1) / args.warm_up
        return 0.5 * (1 + math.cos(math.pi * (step - args.warm_up) / max(1, steps - args.warm_up)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    model, optimizer, scheduler, loader = es.prepare(model, optimizer, scheduler, loader)
    test_loader = es.prepare(test_loader, train=False)

    def right(net: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (net(batch[0].to(device)).argmax(dim=1) == batch[1].to(device)).float().mean()

    parameters = sum(p.numel() for p in model.parameters())
    what = "CIFAR-10" if args.cifar else f"{args.images} made-up images"
    es.print(f"ResNet with {parameters:,} parameters, {args.epochs} epochs of {what}, {args.batch} a step")
    began = time.perf_counter()
    for epoch in es.epochs(args.epochs):
        model.train()
        total = torch.zeros(())
        for pictures, labels in loader:
            loss = functional.cross_entropy(model(pictures.to(device)), labels.to(device), label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            total += es.reduce_mean(loss.detach()).cpu()
        accuracy = es.evaluate(model, test_loader, right)
        es.print(
            f"epoch {epoch}  loss {total / len(loader):.4f}  {accuracy:.1%} of {len(others)} other images right  "
            f"{time.perf_counter() - began:6.1f} s"
        )
    if args.save and es.is_main():
        torch.save(model.state_dict(), args.save)


if __name__ == "__main__":
    main()
