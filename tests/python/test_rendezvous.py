"""How ranks that meet notice that who keeps the store is lost, or that they are to meet no more."""

from __future__ import annotations

import socket
from typing import Any

import pytest

pytest.importorskip("torch")

from evenstep import rendezvous
from evenstep._core import EvenstepError


class DistNetworkError(RuntimeError):
    """As torch's."""


class LostStore:
    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> None:
            raise DistNetworkError("broken pipe")

        return call


class EmptyStore:
    def check(self, keys: list[str]) -> bool:
        return False


@pytest.mark.parametrize("call", ["put", "get", "forget"])
def test_a_store_that_ends_is_the_loss_of_who_keeps_it(call: str) -> None:
    store: Any = LostStore()
    meeting = rendezvous._Meeting(store, "prefix", "group", range(2), 60.0)
    meeting.keys = ["mine"]
    calls = {"put": lambda: meeting.put("0", "here"), "get": lambda: meeting.get("1"), "forget": meeting.forget}
    with pytest.raises(EvenstepError, match="keeps the job's store") as found:
        calls[call]()
    assert found.value.status == "EVEN_ERR_PEER_LOST"


def test_who_waits_for_a_rank_is_let_go_where_there_is_a_newer_generation() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise rendezvous.Overtaken

    store: Any = EmptyStore()
    meeting = rendezvous._Meeting(store, "prefix", "group", range(2), 60.0, look)
    with pytest.raises(rendezvous.Overtaken):
        meeting.get("1")


def test_a_connection_whose_other_end_is_silent_ends_soon() -> None:
    def timeout_of(connection: socket.socket) -> int:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as there:
        ports = [server.getsockname()[1] for server in (here, there)]
        with socket.create_connection(("127.0.0.1", ports[0])) as one:
            with socket.create_connection(("127.0.0.1", ports[1])) as other:
                rendezvous.notice_cut("127.0.0.1", ports[0], seconds=3)
                assert timeout_of(one) == 3000 and one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert timeout_of(other) == 0
                one.sendall(b"whole")
                with here.accept()[0] as at_there:
                    assert at_there.recv(5) == b"whole"


def test_sockets_of_other_families_are_left_alone() -> None:
    """Some libraries keep a netlink socket open: its address is two numbers."""
    pair = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as here, pair[0], pair[1]:
        port = here.getsockname()[1]
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as netlink:
            netlink.bind((0, 0))
            assert isinstance(netlink.getpeername()[0], int)
            with socket.create_connection(("127.0.0.1", port)) as one:
                rendezvous.notice_cut("127.0.0.1", port, seconds=3)
                assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000
