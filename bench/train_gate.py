"""How a bench lets several jobs stand ready and one at a time work for a few seconds: a socket of the bench's, to which
every rank of a job connects, waits for the next order without using the CPU, and answers."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from types import TracebackType
from typing import Any


class Gate:
    """A rank's end."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._file = self._socket.makefile("rw")
        self.answer(int(os.environ["RANK"]))

    def orders(self) -> Iterator[dict[str, Any]]:
        """Until the bench is done."""
        for line in self._file:
            yield json.loads(line)

    def answer(self, result: Any) -> None:
        self._file.write(json.dumps(result) + "\n")
        self._file.flush()


class Job:
    """The bench's end: a job whose ranks wait at their gates. It ends with the `with` block."""

    def __init__(self, command: list[str], ranks: int, limit_seconds: float = 300) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._ranks, self._limit = ranks, limit_seconds
        path = f"{self._folder.name}/gate"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(ranks)
        self._log = pathlib.Path(self._folder.name, "log")
        with self._log.open("w") as log:
            arguments = [*command, "--gate", path]
            self._process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._files: dict[int, Any] = {}

    def __enter__(self) -> Job:
        return self

    def ready(self) -> None:
        """Returns when every rank stands at its gate."""
        self._listener.settimeout(self._limit)
        while len(self._files) < self._ranks:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._fail("did not come to its gate")
            connection.settimeout(self._limit)
            file = connection.makefile("rw")
            self._files[self._read(file)] = file

    def block(self, **order: Any) -> Any:
        """Has all ranks do `order`; rank 0's answer."""
        for file in self._files.values():
            file.write(json.dumps(order) + "\n")
            file.flush()
        answers = [self._read(self._files[rank]) for rank in range(self._ranks)]
        return answers[0]

    def _read(self, file: Any) -> Any:
        try:
            line = file.readline()
        except TimeoutError:
            line = ""
        if not line:
            self._fail("gave no answer")
        return json.loads(line)

    def _fail(self, why: str) -> None:
        raise SystemExit(f"{self._process.args} {why}:\n{self._log.read_text()[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()  # the ranks see the end of their orders
        self._listener.close()
        try:
            self._process.wait(30 if error is None else 1)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        self._folder.cleanup()
