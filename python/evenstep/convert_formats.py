"""Which format an input is in, told by its content; which one an output is to have, told by its name or by --as."""

from __future__ import annotations

import json
from pathlib import Path

from evenstep import convert_deepspeed, convert_tensorflow
from evenstep.checkpoint_files import MANIFEST
from evenstep.convert_contents import DAMAGED, INPUT, UNSUPPORTED, USAGE, Contents, Refused

# What --as takes, and what each is.
OUTPUTS = {
    "evenstep": "an Evenstep checkpoint (a folder)",
    "torch": "a state_dict() in a file of torch.save",
    "six-key": "a file of torch.save with model_state_dict, optimizer_state_dict, scheduler_state_dict, epoch, step, metrics",
    "lightning": "a file as PyTorch Lightning writes it (.ckpt)",
    "safetensors": "one .safetensors file",
    "hf": "a Hugging Face folder: model.safetensors, or shards with an index",
    "dcp": "a folder of torch.distributed.checkpoint",
    "deepspeed": "a folder as DeepSpeed's ZeRO 1, 2 and 3 write it: latest, and a file of optimizer states a rank",
    "tensorflow": "a folder with a TensorFlow checkpoint, model.index and model.data",
}
FOLDERS = ("evenstep", "hf", "dcp", "deepspeed", "tensorflow")
_HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def kind_of(path: Path) -> str:
    """The format of what is there. Raises Refused."""
    if path.is_dir():
        return _folder_kind(path)
    if convert_tensorflow.prefix_of(path) is not None:
        return "tensorflow"
    if not path.exists():
        raise Refused(f"{path} does not exist", "check the path")
    if not path.is_file():
        raise Refused(f"{path} is neither a file nor a folder")
    with path.open("rb") as file:
        start = file.read(64)
    length = int.from_bytes(start[:8], "little")  # may begin with the byte that a pickle begins with
    if len(start) >= 9 and start[8:9] == b"{" and length <= path.stat().st_size - 8:
        return "safetensors"
    if start[:4] == b"PK\x03\x04" or start[:1] == b"\x80":
        return "torch"
    raise Refused(
        f"{path} is in no format that this knows (it begins with {start[:8]!r})",
        "known are files of torch.save and safetensors, and folders of Evenstep, DCP, DeepSpeed and Hugging Face",
        UNSUPPORTED if start else INPUT,
    )


def _folder_kind(path: Path) -> str:
    if (path / MANIFEST).is_file():
        return "evenstep"
    if (path / ".metadata").is_file():
        return "dcp"
    if convert_deepspeed.checkpoint_in(path) is not None:
        return "deepspeed"
    if any((path / name).is_file() for name in _HF_WEIGHTS):
        return "hf"
    if convert_tensorflow.prefix_of(path) is not None:
        return "tensorflow"
    convert_deepspeed.refuse_without_model(path)
    raise Refused(
        f"{path} is no checkpoint that this knows",
        f"a folder has {MANIFEST} (Evenstep), .metadata (DCP), latest or mp_rank_00_model_states.pt (DeepSpeed), "
        "model.safetensors (Hugging Face) or one .index (TensorFlow); name the checkpoint itself, not the folder that it lies in",
    )


def read(path: Path) -> Contents:
    """What it holds. Raises Refused, also where made-up content leads to an error that nobody thought of."""
    kind = kind_of(path)
    try:
        return _read(path, kind)
    except (Refused, OSError, MemoryError):
        raise
    except Exception as error:
        raise Refused(
            f"{path} is damaged, or of a form that this does not know: {type(error).__name__}: {str(error)[:300]}",
            "",
            DAMAGED,
        ) from error


def _read(path: Path, kind: str) -> Contents:
    if kind == "torch":
        from evenstep.convert_torch import interpret, load_safely

        return interpret(load_safely(path), path, "torch")
    if kind == "safetensors":
        from evenstep import convert_safetensors

        return convert_safetensors.read_file(path)
    if kind == "evenstep":
        from evenstep import convert_evenstep

        return convert_evenstep.read_folder(path)
    if kind == "dcp":
        from evenstep import convert_dcp

        return convert_dcp.read_folder(path)
    if kind == "deepspeed":
        folder = convert_deepspeed.checkpoint_in(path)
        assert folder is not None
        return convert_deepspeed.read_folder(folder)
    if kind == "tensorflow":
        prefix = convert_tensorflow.prefix_of(path)
        assert prefix is not None
        return convert_tensorflow.read_bundle(prefix)
    from evenstep import convert_safetensors

    return convert_safetensors.read_folder(path)


def is_replaceable(path: Path) -> bool:
    """Whether --force may remove it: a file, an empty folder, or a checkpoint; never a folder of other things."""
    if not path.is_dir():
        return True
    if not any(path.iterdir()):
        return True
    try:
        kind = _folder_kind(path)
        if kind == "deepspeed" and sum(one.is_dir() for one in path.iterdir()) > 1:
            return False  # several checkpoints
        return kind in FOLDERS and (path / MANIFEST).is_file() == _is_own(path)
    except Refused:
        return False


def _is_own(path: Path) -> bool:
    """Web pages have a manifest.json, too."""
    try:
        return str(json.loads((path / MANIFEST).read_bytes())["format"]).startswith("evenstep-checkpoint")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def output_kind(path: Path, wish: str | None, weights_only: bool) -> str:
    """What to write. Raises Refused."""
    if wish is not None:
        if wish not in OUTPUTS:
            raise Refused(f"--as {wish} is no format", f"one of {', '.join(OUTPUTS)}", USAGE)
        return wish
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        return "safetensors"
    if suffix == ".ckpt" and not weights_only:
        return "lightning"
    if suffix in (".pt", ".pth", ".bin", ".ckpt", ".tar"):
        return "torch" if weights_only else "six-key"
    if suffix in ("", ".distcp"):
        return "hf" if weights_only else "evenstep"
    raise Refused(
        f"{path.name} does not say which format it is to have",
        f"add --as {' | '.join(OUTPUTS)}, or end the name in .pt, .ckpt or .safetensors",
        USAGE,
    )
