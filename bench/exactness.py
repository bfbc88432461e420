"""Parameters after 50 steps of the example GPT: balanced on two unequal ranks (rank 1 at a quarter of its core) against
one plain process, relative difference in the norm over all parameters. To reach: 1e-12 in fp64, 1e-5 in fp32.

    python bench/exactness.py [--steps 50]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import torch
from heading import print_heading

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"


def train(folder: str, ranks: int, dtype: str, steps: int) -> dict[str, torch.Tensor]:
    file = pathlib.Path(folder) / f"{dtype}-{ranks}.pt"
    command = [PROGRAM, "run", "-q", "-n", str(ranks), "--no-monitor", "--runs-dir", folder, "--python", sys.executable]
    command += ["--cpu-quota", "1:0.25"] if ranks > 1 else []
    command += [str(ROOT / "examples" / "char_gpt.py"), "--steps", str(steps), "--dtype", dtype, "--save", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return torch.load(file, weights_only=True)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    apart = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (apart / sum(float(b[name].double().square().sum()) for name in b)) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    steps = parser.parse_args().steps
    print_heading(f"Parameters after {steps} steps, AdamW, two balanced unequal ranks against one rank")
    with tempfile.TemporaryDirectory() as folder:
        for dtype, limit in (("float64", 1e-12), ("float32", 1e-5)):
            found = difference(train(folder, 2, dtype, steps), train(folder, 1, dtype, steps))
            print(
                f"  {dtype}: {found:.2e}   to reach: {limit:.0e}   {'reached' if found <= limit else 'MISSED'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
