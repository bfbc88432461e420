"""An object store on this machine for the tests that want a real one: moto's server of S3, and s3fs to reach it by, both from a
folder of their own (scripts/install_services.sh; EVENSTEP_TEST_S3)."""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
import xml.etree.ElementTree
from collections.abc import Iterator
from typing import Any

import pytest
from run_jobs import go_without

TREE = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = pathlib.Path(os.environ.get("EVENSTEP_TEST_S3", "") or TREE / "build/s3")

SIGNED = "AWS4-HMAC-SHA256 Credential=testing/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class Store:
    """The server, what reaches it, and what it holds."""

    def __init__(self) -> None:
        self._path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))
        self._server = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).with_name("object_store_server.py"))],
            env={**os.environ, "PYTHONPATH": self._path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._server.stdout is not None
        self._port = int(self._server.stdout.readline())

    def end(self) -> None:
        self._server.kill()
        self._server.communicate()

    def environment(self, **more: str) -> dict[str, str]:
        """Of a process that is to reach it. By a name: an address needs no thread of the driver's to be looked up."""
        return {
            "PYTHONPATH": self._path,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_ENDPOINT_URL": f"http://localhost:{self._port}",
        } | more

    def _say(self, **request: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def fail(self, how: str, method: str = ".*", path: str = ".*", times: int = 1, skip: int = 0) -> None:
        """object_store_server.py has the words."""
        self._say(fault={"how": how, "method": method, "path": path, "times": times, "skip": skip})

    def release(self) -> None:
        """What stalls goes on, and no fault comes any more."""
        self._say(release=True)

    def seen(self) -> list[str]:
        """All requests until now, those that failed on purpose with the fault before them."""
        return [str(one) for one in self._say(seen=True)]

    # -- what it holds: asked with a name and a signature that it does not compare --

    def _ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        url = f"http://127.0.0.1:{self._port}/{urllib.parse.quote(path, safe='/?=&')}"
        headers = {"Authorization": SIGNED, "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return bytes(answer.read())

    def make(self, bucket: str) -> str:
        self._ask("PUT", bucket)
        return bucket

    def get(self, path: str) -> bytes:
        return self._ask("GET", path)

    def put(self, path: str, data: bytes) -> None:
        self._ask("PUT", path, data)

    def _texts(self, path: str, name: str) -> list[str]:
        root = xml.etree.ElementTree.fromstring(self._ask("GET", path))
        return [one.text or "" for one in root.iter() if one.tag.rpartition("}")[2] == name]

    def names(self, bucket: str) -> list[str]:
        return sorted(self._texts(f"{bucket}?list-type=2&max-keys=1000", "Key"))

    def buckets(self) -> list[str]:
        return sorted(self._texts("", "Name"))

    def uploads(self, bucket: str) -> list[str]:
        """Of large files, in parts, that have neither ended nor been given up: what a bucket's owner pays for."""
        return self._texts(f"{bucket}?uploads", "UploadId")

    def checkpoints(self, bucket: str, under: str = "run") -> list[str]:
        """Those that have a manifest."""
        ends = ("/manifest.json",)
        found = [name for name in self.names(bucket) if name.startswith(under) and name.endswith(ends)]
        return sorted(name.split("/")[-2] for name in found)


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    if not (PACKAGES / "moto").is_dir() or not (PACKAGES / "s3fs").is_dir():
        go_without("s3", f"no moto and s3fs in {PACKAGES} (scripts/install_services.sh)")
    made = Store()
    yield made
    made.end()


@pytest.fixture
def store(server: Store) -> Iterator[Store]:
    """Without faults, before and after."""
    server.release()
    yield server
    server.release()


@pytest.fixture
def bucket(store: Store) -> str:
    return store.make(f"bucket-{secrets.token_hex(6)}")
