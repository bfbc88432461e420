"""An object store on this machine, for tests: moto's S3, with faults in front of it. Started by object_store.py, with moto on PYTHONPATH.

Prints its port, then hears a line of JSON each, and answers with one: {"fault": {…}} (below), {"release": true}, {"seen": true}."""

from __future__ import annotations

import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

Start = Callable[..., Any]

ERRORS = {
    "InternalError": "500 Internal Server Error",
    "SlowDown": "503 Slow Down",
    "AccessDenied": "403 Forbidden",
    "InvalidAccessKeyId": "403 Forbidden",
    "SignatureDoesNotMatch": "403 Forbidden",
}


class Faults:
    """Of requests whose method and path fit: `skip` go through, then as many as `times` fare as `how` says: an error's code,
    "close" (the connection ends in the midst of what is sent), "stall" (until the release)."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._wanted: list[dict[str, Any]] = []
        self._released = threading.Event()
        self.seen: list[str] = []

    def answer(self, request: dict[str, Any]) -> Any:
        with self._lock:
            if "fault" in request:
                self._released.clear()
                self._wanted.append({"skip": 0, "times": 1, "method": ".*", "path": ".*", **request["fault"]})
            if "release" in request:
                self._wanted.clear()
                self._released.set()
            return self.seen[:] if "seen" in request else []

    def _take(self, said: str, method: str, path: str) -> str:
        with self._lock:
            self.seen.append(said)
            for one in self._wanted:
                if one["times"] > 0 and re.fullmatch(one["method"], method) and re.search(one["path"], path):
                    if one["skip"] > 0:
                        one["skip"] -= 1
                        continue
                    one["times"] -= 1
                    self.seen.append(f"{one['how']}: {said}")
                    return str(one["how"])
        return ""

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        query = environ.get("QUERY_STRING", "")
        how = self._take(f"{method} {path}" + (f"?{query}" if query else ""), method, f"{path}?{query}")
        if how == "stall":
            self._released.wait()
        elif how == "close":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            connection: socket.socket = environ["werkzeug.socket"]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
            connection.shutdown(socket.SHUT_RDWR)
        elif how:
            return self._fail(how, method, environ, start)
        answer: Iterable[bytes] = self._store(environ, start)
        return answer

    def _fail(self, code: str, method: str, environ: dict[str, Any], start: Start) -> list[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        body = f"<Error><Code>{code}</Code><Message>made up: {code}</Message></Error>".encode()
        start(ERRORS[code], [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [] if method == "HEAD" else [body]


def main() -> None:
    faults = Faults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, faults, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    for line in sys.stdin:
        print(json.dumps(faults.answer(json.loads(line))), flush=True)


main()
