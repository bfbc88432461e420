"""Ranks on several hosts, played by one host's processes that are told to take each other for strangers
(EVENSTEP_HOST_ID): the engine is chosen, and every face of the package runs on it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from evenstep import _core, hosts

CASES = Path(__file__).with_name("backend_conformance_cases.py")
MESSAGES = Path(__file__).with_name("backend_message_cases.py")

WITH_UCX = {"ucx": "1.13.1", "why": "", "host": "a"}
WITHOUT_UCX = {"ucx": "", "why": "library libucp.so.0 cannot be opened", "host": "b"}

UCX, WHY_NONE = hosts.ucx_state()
MAY_SKIP = "ucx" not in os.environ.get("EVENSTEP_TEST_REQUIRE", "")  # `make test` skips nothing that it should have run
needs_ucx = pytest.mark.skipif(not UCX and MAY_SKIP, reason=f"no UCX here: {WHY_NONE}")
TCP = {"UCX_TLS": "tcp,self"}


def on_hosts(*names: str) -> dict[int, Mapping[str, str]]:
    return {rank: {"EVENSTEP_HOST_ID": name} for rank, name in enumerate(names)}


@needs_ucx
def test_the_backend_over_ucx(run_ranks: Callable[..., Any]) -> None:
    """Each rank on a host of its own: to the last bit what one host computes."""
    run_ranks(CASES, 2, args=("premultiplied",), env=TCP, rank_env=on_hosts("a", "b"))


@needs_ucx
def test_the_backend_over_two_hosts(run_ranks: Callable[..., Any]) -> None:
    run_ranks(CASES, 3, args=("movements",), env=TCP, rank_env=on_hosts("a", "b", "a"))


@needs_ucx
def test_messages_between_hosts(run_ranks: Callable[..., Any]) -> None:
    run_ranks(MESSAGES, 4, args=("tags_and_any",), env=TCP, rank_env=on_hosts("a", "a", "b", "b"))


TRAINING = """
    import sys
    import torch
    from torch import nn
    import evenstep as es
    from evenstep.session import session

    torch.set_default_dtype(torch.float64)

    def numbers():
        generator = torch.Generator().manual_seed(3)
        return torch.utils.data.TensorDataset(
            torch.randn(64, 5, generator=generator), torch.randn(64, 1, generator=generator)
        )

    def train(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(numbers(), batch_size=16)
        if prepare:
            model, optimizer, loader = es.prepare(model, optimizer, loader)
        for _ in range(2):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return model

    alone = train(False)
    together = train(True)
    for name, parameter in together.state_dict().items():
        torch.testing.assert_close(parameter, alone.state_dict()[name], rtol=1e-10, atol=1e-12)
    print("engine", session().group.comm.engine)
"""


@needs_ucx
@pytest.mark.parametrize(("names", "engine"), [(("a", "a", "b"), "hosts"), (("a", "b"), "ucx")])
def test_training_on_several_hosts(run_ranks: Callable[..., Any], names: tuple[str, ...], engine: str) -> None:
    for rank in run_ranks(TRAINING, len(names), env=TCP, rank_env=on_hosts(*names)):
        assert f"engine {engine}" in rank.stdout


DISAGREE = """
    import os
    import torch
    import torch.distributed as dist
    import evenstep

    dist.init_process_group("evenstep")
    try:
        if int(os.environ["RANK"]) == 1:
            dist.all_reduce(torch.ones(3))  # odd
        else:
            dist.all_reduce(torch.ones(4))  # even
    except evenstep.EvenstepError as error:
        assert error.status == "EVEN_ERR_MISMATCH", error
        words = str(error).split()
        places = {word for word in words if ".py:" in word}
        assert len(places) == 2, error
        print("named both")
    dist.destroy_process_group()
"""


@needs_ucx
def test_a_mismatch_between_hosts_names_both_lines(run_ranks: Callable[..., Any]) -> None:
    for rank in run_ranks(DISAGREE, 2, env=TCP, rank_env=on_hosts("a", "b")):
        assert "named both" in rank.stdout


ARRAYS = """
    import os, socket
    import numpy as np
    import torch.distributed as dist
    import evenstep as es

    def total(group, want):
        values = np.full(1000, 1.0 + group.rank)
        assert (group.all_reduce(values) == want).all(), values[0]

    with es.comm.open(timeout=150) as group:
        rank = group.rank
        assert group._comm.engine == "hosts"
        total(group, 6)
        socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"])), 5).close()  # rank 0's store serves on
        group.barrier()
        across = group.split([1, 0])
        assert (across is None) == (rank == 2)
        inside = group.split([2, 0])
        assert (inside is None) == (rank == 1)
        if across is not None:
            assert across._comm.engine == "ucx" and across.rank == 1 - rank
            total(across, 3)
            alone = across.split([0])
            assert (alone is None) == (rank == 0)
            if alone is not None:
                total(alone, 1)
        if inside is not None:
            assert inside._comm.engine == "shm"
            total(inside, 3)
    with es.comm.open(timeout=150) as again:
        total(again, 6)
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
"""


@needs_ucx
def test_arrays_over_several_hosts(run_ranks: Callable[..., Any]) -> None:
    """es.comm: groups, parts of them, one group after the other, torch's own afterwards."""
    run_ranks(ARRAYS, 3, env={**TCP, "LOCAL_WORLD_SIZE": "2"}, rank_env=on_hosts("a", "b", "a"))


@needs_ucx
def test_arrays_on_the_engine_that_is_asked_for(run_ranks: Callable[..., Any]) -> None:
    script = """
        import os
        import numpy as np
        import evenstep as es

        for engine in ("shm", "ucx"):
            os.environ["EVENSTEP_COMM_ENGINE"] = engine
            with es.comm.open(engine, timeout=150) as group:
                assert group._comm.engine == engine
                assert group.all_reduce(np.ones(3)).tolist() == [2, 2, 2]
        for engine, words in (("gloo", "es.comm does not use it"), ("carrier pigeons", "choose one of shm, ucx, mpi, gloo, hosts")):
            os.environ["EVENSTEP_COMM_ENGINE"] = engine
            try:
                es.comm.open(timeout=150)
            except es.EvenstepError as error:
                assert words in str(error), error
            else:
                raise AssertionError(engine)
    """
    run_ranks(script, 2, env=TCP)


DEATH = """
    import os, signal
    import torch, torch.distributed as dist
    import evenstep

    dist.init_process_group("evenstep")
    rank = dist.get_rank()
    values = torch.ones(100_000)
    dist.all_reduce(values)
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.all_reduce(values)
    except evenstep.EvenstepError as error:
        assert error.status == "EVEN_ERR_PEER_LOST" and error.rank == 3, error
        os._exit(0)
"""


@needs_ucx
def test_a_killed_rank_of_another_host_is_named(run_ranks: Callable[..., Any]) -> None:
    ended = run_ranks(DEATH, 4, env=TCP, rank_env=on_hosts("a", "a", "b", "b"), check=False)
    assert ended[3].returncode == -signal.SIGKILL
    assert [rank.returncode for rank in ended[:3]] == [0, 0, 0], [rank.stderr for rank in ended]


def test_gloo_says_once_what_it_does_not_promise(run_ranks: Callable[..., Any]) -> None:
    script = """
        import torch, torch.distributed as dist
        import evenstep

        dist.init_process_group("evenstep")
        values = torch.ones(3)
        dist.all_reduce(values)
        dist.all_reduce(values, group=dist.new_group([0, 1]))
        assert values[0] == 4
        dist.destroy_process_group()
    """
    first, second = run_ranks(script, 2, env={"EVENSTEP_COMM_ENGINE": "gloo"})
    assert first.stderr.count("the ranks talk through Gloo: EVENSTEP_COMM_ENGINE=gloo.") == 1
    for promise in (
        "slower",
        "names neither it",
        "different calls",
        "flight record",
        "timeline",
        "dtypes",
        "last bits",
    ):
        assert promise in first.stderr, promise
    assert "Gloo" not in second.stderr


def test_ranks_that_want_different_engines(run_ranks: Callable[..., Any]) -> None:
    script = """
        import os
        import torch.distributed as dist
        import evenstep

        try:
            dist.init_process_group("evenstep")
        except evenstep.EvenstepError as error:
            assert "EVENSTEP_COMM_ENGINE differs among the ranks: rank 0 gloo, rank 1 shm" in str(error), error
            os._exit(0)  # at once, and rank 0's store with it: the other has heard
        else:
            raise AssertionError("not refused")
    """
    run_ranks(script, 2, rank_env={0: {"EVENSTEP_COMM_ENGINE": "gloo"}, 1: {"EVENSTEP_COMM_ENGINE": "shm"}})


def test_a_store_that_ends_is_told_in_our_words(run_ranks: Callable[..., Any]) -> None:
    """Rank 0, whose store it is, ends without a word while rank 1 waits for it."""
    script = """
        import os
        from datetime import timedelta
        import torch.distributed as dist
        import evenstep
        from evenstep.rendezvous import open_group

        rank = int(os.environ["RANK"])
        store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0, timedelta(seconds=100))
        if rank == 0:
            store.wait(["evenstep/g/0/1"], timedelta(seconds=100))  # rank 1 is in it
            os._exit(0)
        try:
            open_group(store, 1, 2, name="g", timeout_seconds=100)
        except evenstep.EvenstepError as error:
            assert error.status == "EVEN_ERR_PEER_LOST" and error.rank == 0, error
            assert "keeps the job's store (rank 0, or the launcher) ended before the group g" in str(error), error
        else:
            raise AssertionError("no error")
    """
    run_ranks(script, 2)


@pytest.mark.parametrize(
    ("wanted", "host_of", "ranks", "engine"),
    [
        ("", [0, 0], [WITHOUT_UCX, WITHOUT_UCX], "shm"),
        ("", [0, 1], [WITH_UCX, WITH_UCX], "ucx"),
        ("", [0, 1, 0], [WITH_UCX] * 3, "hosts"),
        ("", [0, 1], [WITH_UCX, WITHOUT_UCX], "gloo"),
        ("ucx", [0, 0], [WITH_UCX, WITH_UCX], "ucx"),
        ("gloo", [0, 0], [WITH_UCX, WITH_UCX], "gloo"),
        ("gloo", [0, 0, 1], [WITH_UCX] * 3, "gloo"),
        ("", [0, 1, 1], [WITH_UCX, WITHOUT_UCX, WITH_UCX], "hosts-gloo"),
        ("hosts-gloo", [0, 1, 0], [WITH_UCX] * 3, "hosts-gloo"),
        ("hosts-gloo", [0, 1], [WITH_UCX, WITH_UCX], "gloo"),
        ("hosts-gloo", [0, 0], [WITH_UCX, WITH_UCX], "shm"),
        ("shm", [0, 0], [WITH_UCX, WITH_UCX], "shm"),
    ],
)
def test_the_choice(wanted: str, host_of: list[int], ranks: list[dict[str, str]], engine: str) -> None:
    chosen, why = hosts.choose(wanted, host_of, ranks)
    assert chosen == engine
    assert ("rank 1 on host b has no UCX (library libucp.so.0" in why) == ("gloo" in engine and wanted == "")


def test_what_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(_core.EvenstepError, match=r"=ucx, but rank 1 on host b has no UCX .*\n  fix: apt-get install"):
        hosts.choose("ucx", [0, 1], [WITH_UCX, WITHOUT_UCX])
    with pytest.raises(_core.EvenstepError, match=r"=shm, but the ranks are on 2 hosts"):
        hosts.choose("shm", [0, 1], [WITH_UCX, WITH_UCX])
    monkeypatch.setenv("EVENSTEP_COMM_ENGINE", "carrier pigeons")
    with pytest.raises(_core.EvenstepError, match="choose one of shm, ucx, mpi, gloo, hosts"):
        hosts.wanted_engine()


def test_gloo_between_hosts_alone_warns_in_words_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_said_gloo", set())
    with pytest.warns(UserWarning) as said:
        for who in ("ranks", "hosts", "ranks", "hosts"):
            hosts.say_gloo("why", who)
    ranks, between = (str(one.message) for one in said)  # each once
    assert ranks.startswith("the ranks talk through Gloo: why. Gloo is slower") and "names neither it" in ranks
    assert between.startswith("the hosts talk through Gloo: why. Between them") and "names neither" not in between


def test_hosts_are_numbered_by_their_first_ranks() -> None:
    assert hosts.host_numbers(["x", "b", "x", "a", "b"]) == [0, 1, 0, 2, 1]


def test_the_network_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    monkeypatch.setenv("EVENSTEP_COMM_INTERFACE", "eth7,mlx5_0:1")
    assert hosts.interfaces() == "eth7,mlx5_0:1"
    monkeypatch.setenv("EVENSTEP_COMM_INTERFACE", "127.0.0.0/8")
    assert hosts.interfaces() == "lo"
    monkeypatch.setenv("EVENSTEP_COMM_INTERFACE", "203.0.113.0/24")
    with pytest.raises(_core.EvenstepError, match=r"has no address in it \(.*lo 127"):
        hosts.interfaces()
    monkeypatch.setenv("EVENSTEP_COMM_INTERFACE", "10.0.0.0/99")
    with pytest.raises(_core.EvenstepError, match="which is no network"):
        hosts.interfaces()
    monkeypatch.delenv("EVENSTEP_COMM_INTERFACE")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert hosts.interfaces() is None


LINKS = """
    import subprocess, threading, time
    from evenstep import hosts

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True)

    ip("link add even0 type veth peer name even1")
    ip("link set even0 up")  # no link yet: the other end is off

    def waited(names, seconds=20.0):
        begin = time.monotonic()
        hosts.await_links(names, seconds)
        return time.monotonic() - begin

    print(waited("even1,lo:1,none,all,mlx5_0:1,"), waited(None), waited("even0", 0.2))
    on = threading.Timer(0.5, ip, ["link set even1 up"])
    begin = time.monotonic()
    on.start()
    hosts.await_links("none,even0", 20.0)
    print(time.monotonic() - begin, flush=True)
    on.join()
    ip("link del even0")
"""


def test_ranks_wait_for_a_link_that_comes(tmp_path: Path) -> None:
    """UCX passes over an interface whose link the kernel has not told yet, which lasts up to a second; one that stays without does
    not hold a rank up, nor what is switched off, or no interface."""
    pair = "ip link add even0 type veth peer name even1"
    if (
        shutil.which("unshare") is None
        or subprocess.run(["unshare", "-n", "sh", "-c", pair], capture_output=True).returncode != 0
    ):
        pytest.skip("no network namespaces, or no pairs of interfaces, here")
    script = tmp_path / "links.py"
    script.write_text(textwrap.dedent(LINKS))
    ran = subprocess.run(["unshare", "-n", sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    off, none, without, came = map(float, ran.stdout.split())
    assert off < 5 and none < 5, "something that is no link was waited for"
    assert 0.2 <= without < 10
    assert 0.4 < came < 15, "the link was not waited for, or not seen"
