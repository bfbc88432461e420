"""What `evenstep ckpt convert` and `evenstep ckpt export` start: reads a checkpoint of one format, writes another.

    python -m evenstep.ckpt_convert IN OUT [--as FORMAT] [--force] [--weights-only] …

The last line that it prints is JSON for the program: {"text", "report"}, or {"what", "fix", "code"} where it failed."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evenstep._core import EvenstepError
from evenstep.checkpoint_files import PARTIAL, sync_folder, total_bytes
from evenstep.convert_contents import INPUT, SYSTEM, USAGE, Contents, Key, Refused
from evenstep.convert_formats import FOLDERS, OUTPUTS, is_replaceable, output_kind, read

FORMAT = "evenstep-ckpt-convert-1"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evenstep.ckpt_convert")
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--as", dest="kind")
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--weights-only", action="store_true")
    parser.add_argument("--model", default="model")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--shard-bytes", type=int, default=5_000_000_000)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--zero-stage", type=int)
    options = parser.parse_args()
    if options.kind != "deepspeed" and (options.ranks is not None or options.zero_stage is not None):
        raise Refused("--ranks and --zero-stage are for --as deepspeed", "leave them out", USAGE)
    return options


# -- the place of the result --


def check_place(source: Path, target: Path, force: bool) -> None:
    if target.name in ("", ".", ".."):
        raise Refused(f"{target} is no name for a new checkpoint", "", USAGE)
    if target.name.endswith(PARTIAL):
        raise Refused(f"names that end in {PARTIAL} are those of unfinished files", "choose another name", USAGE)
    if not target.absolute().parent.is_dir():
        raise Refused(f"the folder {target.absolute().parent} does not exist", "make it first")
    there, here = target.resolve(), source.resolve()
    if there == here or there in here.parents:
        raise Refused(f"{target} is, or holds, the input", "choose another name")
    if not os.path.lexists(target):
        return
    if not force:
        raise Refused(f"{target} exists", "choose another name, or --force replaces it")
    if target.is_symlink() or not is_replaceable(target):
        raise Refused(f"{target} is no checkpoint, so --force does not replace it", "choose another name")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def sync_tree(path: Path) -> None:
    for one in (path, *path.rglob("*")):
        if one.is_dir():
            sync_folder(one)
        else:
            with one.open("rb") as file:
                os.fsync(file.fileno())


def _put(partial: Path, target: Path) -> None:
    """A file takes the other's place in one step. Of a folder the old one steps aside first: a crash between the two
    leaves both, under other names."""
    if target.is_dir():
        aside = target.with_name(f"{target.name}.replaced{PARTIAL}")
        _remove(aside)
        target.rename(aside)
        partial.rename(target)
        _remove(aside)
    else:
        partial.replace(target)
    sync_folder(target.absolute().parent)


@contextmanager
def partial_of(target: Path) -> Iterator[Path]:
    """A name to write to, which becomes the target's where all went well, and goes where it did not."""
    partial = target.with_name(target.name + PARTIAL)
    _remove(partial)
    try:
        yield partial
        _put(partial, target)
    finally:
        _remove(partial)


# -- reading and writing --


def _choose_model(contents: Contents, name: str) -> None:
    """That model alone, under the first one's name; of the optimizers those that are of no other."""
    if name == "model":
        return
    if name not in contents.models:
        raise Refused(f"there is no model {name!r}", f"it has {', '.join(contents.models)}", USAGE)
    for other in contents.models:
        if other != name:
            contents.leave(f"{other}: the model that was asked for is {name}")
    contents.models = {"model": contents.models[name]}
    contents.model_extra = {"model": contents.model_extra[name]} if name in contents.model_extra else {}
    # A scheduler does not say whose it is: where there are as many, those of optimizers in the same order.
    whose = dict(zip(contents.optimizers, contents.schedulers))
    whose = whose if len(contents.optimizers) == len(contents.schedulers) else {}
    for of, optimizer in list(contents.optimizers.items()):
        keys = optimizer.keys()
        names: dict[Key, Key] = {k: k.removeprefix(f"{name}:") if isinstance(k, str) else k for k in keys}
        if any(key == plain for key, plain in names.items()):
            contents.leave(f"{of}: it has parameters of another model than {name}")
            del contents.optimizers[of]
            if of in whose:
                contents.leave(f"{whose[of]}: its optimizer is {of}")
                del contents.schedulers[whose[of]]
        else:
            optimizer.members = [[names[key] for key in group] for group in optimizer.members]
            optimizer.state = {names.get(key, key): values for key, values in optimizer.state.items()}
    contents.note(f"the model is {name}")


def _only_weights(contents: Contents) -> None:
    """What export leaves is what it is for, and not worth a line each."""
    contents.optimizers, contents.schedulers, contents.extra = {}, {}, {}
    contents.step = contents.epoch = None
    contents.left = [line for line in contents.left if "beside the model" in line]


def _write_file(contents: Contents, target: Path, kind: str) -> None:
    from evenstep import convert_safetensors, convert_torch

    if kind != "safetensors":
        convert_safetensors.leave_files(contents)
    with partial_of(target) as partial, partial.open("wb") as file:
        if kind == "safetensors":
            convert_safetensors.write_file(contents, file)
        elif kind == "torch":
            extra = contents.model_extra
            contents.model_extra = {}  # torch's file holds these
            convert_safetensors.leave_all_but_weights(contents)
            contents.model_extra = extra
            convert_torch.save(convert_torch.model_to_torch(contents), file)
        else:
            make = convert_torch.six_keys if kind == "six-key" else convert_torch.lightning
            convert_torch.save(make(contents), file)
        file.flush()
        os.fsync(file.fileno())


def _write_folder(contents: Contents, target: Path, kind: str, options: argparse.Namespace) -> None:
    if kind == "evenstep":
        from evenstep import convert_evenstep

        convert_evenstep.write_folder(contents, target.absolute(), bool(options.force))
        return
    with partial_of(target) as partial:
        partial.mkdir()
        if kind == "hf":
            from evenstep import convert_safetensors

            beside = [options.config] if options.config is not None else []
            convert_safetensors.write_folder(contents, partial, options.shard_bytes, beside)
        elif kind == "deepspeed":
            from evenstep import convert_deepspeed_writer

            convert_deepspeed_writer.write_folder(contents, partial, options.ranks or 1, options.zero_stage or 2)
        elif kind == "tensorflow":
            from evenstep import convert_tensorflow

            convert_tensorflow.write_folder(contents, partial)
        else:
            from evenstep import convert_dcp, convert_safetensors
            from evenstep.convert_contents import name_optimizers

            convert_safetensors.leave_files(contents)
            name_optimizers(contents)
            convert_dcp.write_folder(contents, partial)
        sync_tree(partial)


def convert(options: argparse.Namespace) -> dict[str, Any]:
    kind = output_kind(options.output, options.kind, options.weights_only)
    if options.config is not None and (kind != "hf" or not options.config.is_file()):
        raise Refused(
            f"--config {options.config}: a file for a Hugging Face folder (--as hf) is named there", "", USAGE
        )
    if kind in FOLDERS and options.output.is_file():
        raise Refused(f"{options.output} is a file, and {OUTPUTS[kind]} is a folder", "choose another name", INPUT)
    check_place(options.input, options.output, options.force)
    contents = read(options.input)
    if options.weights_only:
        _only_weights(contents)
    _choose_model(contents, options.model)
    carried = {
        "tensors": sum(len(tensors) for tensors in contents.models.values()),
        "bytes": sum(total_bytes(tensors) for tensors in contents.models.values()),
    }
    if kind in FOLDERS:
        _write_folder(contents, options.output, kind, options)
    else:
        _write_file(contents, options.output, kind)
    return {
        "format": FORMAT,
        "input": os.fspath(options.input),
        "input_format": contents.format,
        "output": os.fspath(options.output),
        "output_format": kind,
        **carried,
        "step": contents.step,
        "epoch": contents.epoch,
        "left": contents.left,
        "notes": contents.notes,
    }


def clean(text: str) -> str:
    """Names in a file are anyone's: no control characters for the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def text_of(report: dict[str, Any]) -> str:
    lines = [
        f"{report['output']}: {OUTPUTS[report['output_format']]}, of {report['tensors']} tensors "
        f"({report['bytes']:,} bytes) from {report['input_format']} {report['input']}"
    ]
    lines += [f"  note: {note}" for note in report["notes"]]
    lines += [f"  left out: {left}" for left in report["left"]]
    return "\n".join(clean(line) for line in lines)


def failure(error: BaseException) -> dict[str, Any]:
    if isinstance(error, Refused):
        return {"what": clean(error.what), "fix": clean(error.fix), "code": error.code}
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = f"{error.filename}: " if error.filename is not None else ""
        fix = "free some space, or choose another disk" if full else ""
        return {"what": clean(f"{where}{error.strerror or error}"), "fix": fix, "code": SYSTEM}
    if isinstance(error, MemoryError):
        return {"what": "there is not enough memory for all of the tensors", "fix": "", "code": SYSTEM}
    what, _, fix = str(error).partition("\n  fix: ")
    return {"what": clean(what), "fix": clean(fix), "code": SYSTEM}


def main() -> int:
    try:
        report = convert(arguments())
    except (Refused, OSError, MemoryError, EvenstepError) as error:
        print(json.dumps(failure(error)), flush=True)
        return 1
    print(json.dumps({"text": text_of(report), "report": report}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
