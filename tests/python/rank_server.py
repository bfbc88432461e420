"""A process that has imported torch and forks ranks on request: a rank then starts in milliseconds, not in seconds.

Each rank is a process of its own with its own environment, folder, arguments, output and `__main__`; only torch (and the
part of it that the first optimizer imports) is already there. evenstep is not: each rank imports it, of which no more is done
before than that its modules' code is read. `tests/python/conftest.py` speaks to it, one JSON object a line: {"ranks":
[{"argv", "env", "cwd", "out", "err"}, …]} is answered by {"pids": […]}, and when all have ended, {"wait": true} by
{"returncodes": […]}.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib.machinery
import importlib.util
import json
import os
import random
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
import torch._dynamo
import torch.distributed  # noqa: F401  (ranks find it imported)


class _Read(importlib.machinery.SourceFileLoader):
    """Of a module whose code a rank does not read and take apart once more: a third of what importing evenstep costs."""

    codes: ClassVar[dict[str, types.CodeType]] = {}

    def get_code(self, fullname: str) -> types.CodeType:
        return self.codes[fullname]


class _Finder:
    """Finds evenstep's modules as Python would, where they are those that were read."""

    folders: ClassVar[list[str]] = []

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> object:
        if name not in _Read.codes or list(path or ()) != cls.folders:
            return None
        place = os.path.join(cls.folders[0], name.rpartition(".")[2] + ".py")
        return importlib.util.spec_from_file_location(name, place, loader=_Read(name, place))


def _read_evenstep() -> None:
    """Its modules' code alone: nothing of them is run here."""
    spec = importlib.util.find_spec("evenstep")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    if len(folders) != 1:
        return
    for entry in sorted(os.listdir(folders[0])):
        module, dot, kind = entry.partition(".")
        if (dot + kind) == ".py" and module != "__init__":
            name = f"evenstep.{module}"
            code = importlib.machinery.SourceFileLoader(name, os.path.join(folders[0], entry)).get_code(name)
            if code is not None:
                _Read.codes[name] = code
    _Finder.folders = folders
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]


class _Rank(Exception):
    """Leaves the server's loop in a forked rank, with what it is to do."""

    def __init__(self, order: dict) -> None:
        super().__init__()
        self.order = order


def _become(order: dict) -> None:
    """Gives this process what a program started anew would find."""
    os.setpgid(0, 0)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    for path, descriptor, flags in (
        ("/dev/null", 0, os.O_RDONLY),
        (order["out"], 1, os.O_WRONLY | os.O_APPEND),
        (order["err"], 2, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.argv[:] = order["argv"]
    sys.path[0] = os.path.dirname(os.path.abspath(order["argv"][0]))
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _run(path: str) -> int:
    """Runs the script as the main module; its exit status."""
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as source:
            exec(compile(source.read(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as exit_:
        if exit_.code is None or isinstance(exit_.code, int):
            return exit_.code or 0
        print(exit_.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next  # without this function's frame
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def _end(code: int) -> None:
    """Ends the rank as Python does (3.12: without new threads) up to its last part: taking torch's modules apart costs
    a quarter of a second, in which every page of theirs is copied. Ranks that start as programs do it (`fresh=True`,
    `evenstep run`)."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    threading.Thread.start = _no_thread  # type: ignore[method-assign]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code & 0xFF)


def _start(orders: list[dict]) -> list[int]:
    pids = []
    for order in orders:
        pid = os.fork()
        if pid == 0:
            raise _Rank(order)
        pids.append(pid)
    return pids


def _lines(descriptor: int) -> Iterator[bytes]:
    """Plain reads: a forked rank must not inherit a stream that would be flushed or closed at its end."""
    text = b""
    while chunk := os.read(descriptor, 65536):
        *lines, text = (text + chunk).split(b"\n")
        yield from lines


def _serve(requests: int, replies: int) -> None:
    pids: list[int] = []
    for line in _lines(requests):
        asked = json.loads(line)
        if "ranks" in asked:
            pids = _start(asked["ranks"])
            answer = {"pids": pids}
        else:
            answer = {"returncodes": [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]}
        os.write(replies, json.dumps(answer).encode() + b"\n")


def _main() -> int:
    requests, replies = os.dup(0), os.dup(1)
    _read_evenstep()
    gc.collect()
    gc.freeze()  # else each rank's collector touches, and so copies, all of torch: most of a second at its end
    try:
        _serve(requests, replies)
        return 0
    except _Rank as rank:
        order = rank.order
    os.close(requests)
    os.close(replies)
    try:
        _become(order)
    except OSError:
        traceback.print_exc()
        return 1
    code = _run(order["argv"][0])
    _end(code)
    return code


if __name__ == "__main__":
    sys.exit(_main())
