"""PyTorch's own distributed example scripts on backend "evenstep", on the CPUs of this host, as they are: says which ran.

    git clone https://github.com/pytorch/examples
    python scripts/pytorch_examples.py --checkout examples [--only NAME]

Nothing is fetched. The scripts are written for two GPUs or more and NCCL; scripts/on_cpu/sitecustomize.py, on their PYTHONPATH,
puts CPUs and our backend in these places. One ran if it ended with 0, printed what it prints, or saved what it saves, when it has
trained, and every rank of it made collectives on our engine; where it is to go on, if each rank has loaded what was saved before.
Ends with 1 where one that could run did not; one that does not end in time is ended with all its ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

TREE = pathlib.Path(__file__).resolve().parent.parent
MADE = re.compile(r"evenstep: rank (\d+) made (\d+) collectives in (\d+) groups?")
LOADED = re.compile(r"evenstep: rank (\d+) loaded (.+)")
LIMIT = 900.0


class Example(NamedTuple):
    script: str  # below `distributed`
    says: str  # once it has trained; "" where it says nothing,
    saves: str = ""  # but saves files: a pattern of their names
    ranks: int = 2
    words: tuple[str, ...] = ()
    times: int = 1  # the second time goes on from what the first has saved
    needs: tuple[str, ...] = ()  # modules beside torch
    cannot: str = ""  # why it is not tried


SMALL = (
    "data_config.path=data/input.txt data_config.truncate=0.01 data_config.block_size=32 gpt_config.n_layer=2 gpt_config.n_head=2 "
    "gpt_config.n_embd=32 trainer_config.max_epochs=1 trainer_config.save_every=1 trainer_config.data_loader_workers=0"
)
EXAMPLES = (
    Example("ddp/example.py", "training completed in rank 1!"),
    Example("ddp-tutorial-series/multigpu.py", "Epoch 1 |", words=("2", "1")),
    Example("ddp-tutorial-series/multigpu_torchrun.py", "Training snapshot saved", words=("2", "1")),
    Example("ddp-tutorial-series/multinode.py", "Training snapshot saved", words=("2", "1")),
    Example(
        "minGPT-ddp/mingpt/main.py", "Snapshot saved at epoch 1", words=tuple(SMALL.split()), needs=("boto3", "hydra")
    ),
    Example("FSDP2/example.py", "", "checkpoints/dtensor_api/*/*.pt", times=2),
    Example(
        "FSDP2/example.py",
        "",
        "checkpoints/dtensor_api/*/*.pt",
        words=("--explicit-prefetching", "--mixed-precision"),
    ),
    Example("FSDP2/example.py", "", "checkpoints/dcp_api/*/*.pt", words=("--dcp-api",), times=2),
    Example("FSDP/T5_training.py", "", cannot="it loads a model and a data set from a hub"),
    Example("tensor_parallelism/tensor_parallel_example.py", "Tensor Parallel training completed!"),
    Example("tensor_parallelism/sequence_parallel_example.py", "Sequence Parallel training completed!"),
    Example(
        "tensor_parallelism/fsdp_tp_example.py", "", ranks=4, cannot="torch's DTensor has no rule for attention on CPUs"
    ),
)


def cannot_run(example: Example, checkout: pathlib.Path) -> str:
    """Why not; "" where it can."""
    if not (checkout / "distributed" / example.script).is_file():
        return "not in this checkout"
    lacking = [name for name in example.needs if importlib.util.find_spec(name) is None]
    return example.cannot or (f"it needs {' and '.join(lacking)}" if lacking else "")


def end_all(root: int) -> None:
    """It, which leads a session, and all that descend from it: torchrun gives each rank a session of its own."""
    children: dict[int, list[int]] = {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, groups = [root], {root}
    for pid in found:  # which grows
        found += children.get(pid, [])
        with contextlib.suppress(OSError):
            groups.add(os.getpgid(pid))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


def run_once(example: Example, folder: pathlib.Path) -> tuple[int | None, str]:
    """(its code, None where it was ended after LIMIT seconds; all that it printed). A script that starts its ranks itself is started as
    it is."""
    script = folder / pathlib.Path(example.script).name
    starts_itself = script.name == "multigpu.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(example.ranks)]
    command = [sys.executable, *([] if starts_itself else torchrun), script.name, *example.words]
    path = [str(TREE / "scripts" / "on_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {"PYTHONPATH": os.pathsep.join(path), "EVENSTEP_ON_CPU": str(example.ranks), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        try:
            text, _ = started.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            end_all(started.pid)
            return None, started.communicate()[0]
        except BaseException:
            end_all(started.pid)  # Ctrl-C does not reach its session
            raise
        return started.returncode, text


def saved(example: Example, folder: pathlib.Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.glob(example.saves)} if example.saves else set()


def lacks(example: Example, code: int | None, text: str, before: set[str], after: set[str]) -> str:
    """What shows that it did not run, or, where something was saved before, did not go on from it; "" where it did."""
    loaded = {(int(rank), name) for rank, name in LOADED.findall(text)}
    if code != 0:
        why = next(iter(re.findall(r"^.*Error: .*$", text, re.MULTILINE)), text[-3000:])
        return (
            f"FAILED with {code}: {why}" if code is not None else f"FAILED: it had not ended after {LIMIT:g} s: {why}"
        )
    if example.says not in text:
        return f"FAILED: it did not say {example.says!r}: {text[-3000:]}"
    if not example.says and not after - before:
        return f"FAILED: it saved nothing as {example.saves!r}: {text[-3000:]}"
    lost = [(rank, name) for rank in range(example.ranks) for name in sorted(before) if (rank, name) not in loaded]
    return f"FAILED: rank {lost[0][0]} did not load {lost[0][1]}" if lost else ""


def outcomes(example: Example, checkout: pathlib.Path) -> Iterator[tuple[bool, str]]:
    """Of each time: whether it ran, and in words; ends with the first that did not."""
    with tempfile.TemporaryDirectory() as name:  # they save beside themselves
        folder = pathlib.Path(name) / "example"
        shutil.copytree((checkout / "distributed" / example.script).parent, folder)
        for _ in range(example.times):
            before = saved(example, folder)
            code, text = run_once(example, folder)
            made = {int(rank): int(calls) for rank, calls, _ in MADE.findall(text)}
            calls = [made.get(rank, 0) for rank in range(example.ranks)]
            why = lacks(example, code, text, before, saved(example, folder))
            if not why and not all(calls):
                why = f"FAILED: rank {calls.index(0)} made no collectives"
            yield not why, why or f"{min(calls)} collectives on each rank"
            if why:
                return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", metavar="PATH", type=pathlib.Path, required=True, help="of pytorch/examples")
    parser.add_argument("--only", metavar="NAME", default="", help="those whose path has NAME in it")
    options = parser.parse_args()
    import torch

    head = ["git", "-C", str(options.checkout), "log", "-1", "--format=%h of %cs"]
    commit = subprocess.run(head, capture_output=True, text=True).stdout.strip() or "no git checkout"
    print(f'PyTorch\'s examples ({commit}) on backend "evenstep", torch {torch.__version__}, CPU ranks of one host')
    failed = 0
    for example in EXAMPLES:
        if options.only not in example.script:
            continue
        words = f"{example.script} {' '.join(example.words)}".strip()
        if why := cannot_run(example, options.checkout):
            print(f"  not run  {words}: {why}", flush=True)
            continue
        for number, (ran, said) in enumerate(outcomes(example, options.checkout)):
            failed += not ran
            again = ", going on from what it saved" if number else ""
            print(f"  {'ran' if ran else '':7}  {words} ({example.ranks} ranks{again}): {said}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
