"""What collectives cost, kept from job to job: measured at first use, remembered, obeyed, forced; and places where it cannot be
kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from test_hosts import TCP, needs_ucx, on_hosts

from evenstep import _core, comm_costs, hosts


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No table of an earlier test, nor one of this process afterwards: of calls at its end this module's alone are left out, not pytest's."""
    monkeypatch.setattr(comm_costs, "_kept", None)
    monkeypatch.setattr(comm_costs, "atexit", SimpleNamespace(register=lambda call: call))


# ---- the table and its place ----


def test_a_table_from_python(tmp_path: Path) -> None:
    costs, place = _core.CommCosts(), str(tmp_path / "deep" / "costs.json")
    costs.load(place)
    assert costs.find("all_reduce", "s", "ucx", "whole", 1024) is None and costs.rows() == []
    costs.add("all_reduce", "s", "ucx", "whole", 1024, 1e-5)
    costs.save(place)
    again = _core.CommCosts()
    again.load(place)
    assert again.find("all_reduce", "s", "ucx", "whole", 2048) == pytest.approx(2e-5)
    (row,) = again.rows()
    assert row[:5] == ("all_reduce", "s", "ucx", "whole", 1024) and row[6] == 1 and row[7] > 1.7e9
    assert again.step("s", "ucx") is None
    again.add("all_reduce", "s", "ucx", "call", 1024, 1e-5)
    assert again.step("s", "ucx") == pytest.approx(20e-5 + 4 * 64e-5 + 2 * 4096e-5)
    with pytest.raises(_core.EvenstepError, match="above 0"):
        costs.add("all_reduce", "s", "ucx", "whole", 1024, -1)
    with pytest.raises(TypeError):
        _core.CommCosts(1)  # type: ignore[call-arg]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EVENSTEP_COMM_COSTS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert comm_costs.path() == tmp_path / "evenstep" / "comm-costs.json" and comm_costs.measures()
    monkeypatch.setenv("HOME", str(tmp_path))
    for other in ("", "not/absolute"):
        monkeypatch.setenv("XDG_CACHE_HOME", other)
        assert comm_costs.path() == tmp_path / ".cache" / "evenstep" / "comm-costs.json"
    for nowhere in ("", "not/absolute"):
        monkeypatch.setenv("HOME", nowhere)
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=nowhere: path.replace("~", home or "~"))
        assert comm_costs.path() is None
    monkeypatch.setenv("EVENSTEP_COMM_COSTS", "mine.json")
    assert comm_costs.path() == Path("mine.json")
    monkeypatch.setenv("EVENSTEP_COMM_COSTS", "off")
    assert comm_costs.path() is None and not comm_costs.measures()


def test_the_make_up_of_groups() -> None:
    def words(host_of: list[int], masks: list[str], network: str = "") -> str:
        return comm_costs.shape_of(host_of, masks, ["A x 2"], network)

    assert words([0, 0], ["1", "2"]) == "2 ranks; cores of their own; A x 2"
    assert words([0, 0], ["3", "3"], "ignored") == "2 ranks; cores of their own; A x 2"
    assert words([0, 0], ["2", "2"]) == "2 ranks; cores shared; A x 2"
    assert words([0, 1], ["1", "1"], "eth0") == "2x1 ranks; cores of their own; A x 2; eth0"
    assert words([0, 1, 0, 1, 2], ["3"] * 5, "eth0").startswith("2x2+1 ranks; cores of their own")
    assert words([0, 1, 0, 0], ["3"] * 4).startswith("3+1 ranks; cores shared")
    machines = ["B x 1", "A x 2", "B x 1"]
    assert comm_costs.shape_of([0, 1, 2], ["1"] * 3, machines).endswith("A x 2 and B x 1")
    assert len(comm_costs.shape_of([0], ["1"], ["é\n" * 300]).encode()) <= 255
    assert int(comm_costs.cpu_mask(), 16).bit_length() == max(os.sched_getaffinity(0)) + 1
    assert " x " in comm_costs.machine()


def test_a_damaged_file_is_said_once_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "costs.json"
    place.write_text('{"format": "evenstep-comm-costs-1", "costs": [{"ns": -1}]}')
    monkeypatch.setenv("EVENSTEP_COMM_COSTS", str(place))
    monkeypatch.setenv("EVENSTEP_COMM_DEBUG", "1")
    with pytest.warns(UserWarning, match=r'costs.json: cost 1: its "ns" is no whole number(.|\n)*fix: remove the file'):
        costs = comm_costs.table()
    costs.add("all_reduce", "s", "ucx", "whole", 1024, 1e-5)
    comm_costs.keep()
    assert place.read_text().endswith('[{"ns": -1}]}')
    assert "costs are not kept: " in capfd.readouterr().err


def test_a_place_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EVENSTEP_COMM_COSTS", "/proc/no/such/costs.json")
    comm_costs.table().add("all_reduce", "s", "ucx", "whole", 1024, 1e-5)
    comm_costs.keep()
    assert capfd.readouterr().err == ""  # said only where it is asked for
    monkeypatch.setattr(comm_costs, "_kept", None)
    monkeypatch.setenv("EVENSTEP_COMM_DEBUG", "1")
    comm_costs.table().add("all_reduce", "s", "ucx", "whole", 1024, 1e-5)
    comm_costs.keep()
    comm_costs.keep()  # it has given up
    assert capfd.readouterr().err.count("costs are not kept: ") == 1


def test_a_place_whose_name_is_no_text(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("EVENSTEP_COMM_COSTS", "/tmp/\udcff/costs.json")
    monkeypatch.setenv("EVENSTEP_COMM_DEBUG", "1")
    comm_costs.table().add("all_reduce", "s", "ucx", "whole", 1024, 1e-5)
    comm_costs.keep()
    assert "is not UTF-8" in capfd.readouterr().err


# ---- jobs ----

JOB = """
    import numpy as np
    import evenstep as es

    with es.comm.open(timeout=150) as group:
        values = np.full(20_000, 1.0 + group.rank)
        assert (group.all_reduce(values) == sum(range(1, group.size + 1))).all()
        print("engine", group._comm.engine)
        print(group._comm.description)
"""


def kept(place: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(place.read_text())["costs"]
    return rows


@needs_ucx
def test_measured_at_first_use_and_remembered(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    place = tmp_path / "costs.json"
    env = {**TCP, "EVENSTEP_COMM_COSTS": str(place), "EVENSTEP_COMM_DEBUG": "1", "LOCAL_WORLD_SIZE": "2"}

    def job() -> Any:
        return run_ranks(JOB, 3, env=env, rank_env=on_hosts("a", "b", "a"), timeout=240)

    ranks = job()
    said = ranks[0].stderr
    assert "(0 known)" in said and "for 2+1 ranks; " in said and "the all-reduces of a step take" in said
    assert "by cost:" in ranks[0].stdout  # with the figures of what was chosen
    rows = kept(place)
    chosen = ranks[0].stdout.split()[1]
    assert {row["engine"] for row in rows if row["way"] == "call"} == {"hosts", "ucx"}
    assert {row["way"] for row in rows if row["engine"] == chosen} == {"call", "parts", "whole"}
    assert len({row["shape"] for row in rows}) == 1

    before = place.read_text()
    assert f"({len(rows)} known)" in job()[0].stderr
    assert place.read_text() == before  # one call of a known size: nothing was measured

    for cheap, ns in (("ucx", 1_000), ("hosts", 4_000_000_000)):
        for row in rows:
            if row["engine"] == "ucx" and row["way"] == "call":
                row["ns"] = ns
        place.write_text(json.dumps({"format": "evenstep-comm-costs-1", "costs": rows}))
        assert [rank.stdout.split()[1] for rank in job()] == [cheap] * 3


@needs_ucx
@pytest.mark.parametrize("way", ["parts", "whole"])
def test_a_way_that_is_asked_for(run_ranks: Callable[..., Any], way: str) -> None:
    env = {**TCP, "EVENSTEP_COMM_ALGORITHM": way, "EVENSTEP_COMM_ENGINE": "ucx"}
    ranks = run_ranks(JOB, 2, env=env)
    assert f"all_reduce: {way}, as asked for" in ranks[0].stdout


def test_pieces_that_are_asked_for_and_a_way_that_is_none(run_ranks: Callable[..., Any]) -> None:
    script = """
        import os
        import numpy as np
        import torch
        import evenstep as es

        os.environ["EVENSTEP_COMM_ALGORITHM"] = "pieces-4M"
        with es.comm.open("first", timeout=150) as group:
            group.all_reduce(np.ones(1 << 21, dtype=np.float32))
            assert "pieces of 4096 KB" in group._comm.description, group._comm.description
        os.environ["EVENSTEP_COMM_ALGORITHM"] = "chain"
        with es.comm.open("chained", timeout=150) as group:
            assert (group.all_reduce(np.ones(1 << 21, dtype=np.float32)) == group.size).all()
            assert "by a chain" in group._comm.description, group._comm.description
        os.environ["EVENSTEP_COMM_ALGORITHM"] = "sideways"
        try:
            es.comm.open("second", timeout=150)
        except es.EvenstepError as error:
            assert "'sideways' is no way of any engine" in str(error) and "parts, whole" in error.fix, error
        else:
            raise AssertionError("not refused")
    """
    run_ranks(script, 2)


def test_what_shared_memory_learns_is_kept(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    script = """
        import numpy as np
        import evenstep as es

        with es.comm.open(timeout=150) as group:
            values = np.ones(1 << 21, dtype=np.float32)
            for _ in range(7):
                group.all_reduce(values)
    """
    place = tmp_path / "costs.json"
    run_ranks(script, 2, env={"EVENSTEP_COMM_COSTS": str(place)})
    ways = {row["way"] for row in kept(place)}
    assert ways in ({"pieces-256K", "pieces-1M"}, {"pieces-1M", "chain"})  # the latter where ranks share cores
    assert {(row["engine"], row["bytes"]) for row in kept(place)} == {("shm", 1 << 24)}


def test_a_part_of_a_group_chooses_and_learns_too(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    script = """
        import os
        import numpy as np
        import evenstep as es

        values = np.ones(1 << 21, dtype=np.float32)
        with es.comm.open(timeout=150) as group:
            part = group.split([2, 0])
            if part is not None:
                for _ in range(7):
                    part.all_reduce(values)
                part.close()
            os.environ["EVENSTEP_COMM_ALGORITHM"] = "pieces-4M"
            part = group.split([1, 2])
            if part is not None:
                part.all_reduce(values)
                assert "pieces of 4096 KB" in part._comm.description, part._comm.description
                part.close()
            os.environ["EVENSTEP_COMM_ALGORITHM"] = "sideways"
            try:
                assert group.split([0, 1]) is None
            except es.EvenstepError as error:
                assert group.rank < 2 and "'sideways' is no way of any engine" in str(error), error
            else:
                assert group.rank == 2
    """
    place = tmp_path / "costs.json"
    env = {"EVENSTEP_COMM_COSTS": str(place), "EVENSTEP_COMM_DEBUG": "1"}
    ranks = run_ranks(script, 3, env=env)
    opened = "evenstep: comm: group comm/default/1/part{}, rank 0, at its opening: shared memory, 2 ranks, "
    assert opened.format(1) in ranks[2].stderr and opened.format(2) in ranks[1].stderr, [rank.stderr for rank in ranks]
    assert {row["shape"].split(";")[0] for row in kept(place)} == {"2 ranks"}


GRADIENTS = """
    import torch
    from torch import nn
    import evenstep as es

    torch.distributed.init_process_group("gloo")  # else es.prepare makes a group of the backend, which measures
    model = nn.Linear(5, 300)
    es.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    es.barrier()
"""


@needs_ucx
def test_gradients_measure_between_engines(run_ranks: Callable[..., Any], tmp_path: Path) -> None:
    """es.prepare: the control group does not, the gradients' does, once; later jobs know, and a forced engine asks nobody."""
    place = tmp_path / "costs.json"
    env = {**TCP, "EVENSTEP_COMM_COSTS": str(place), "EVENSTEP_COMM_DEBUG": "1"}

    def engine(**more: str) -> tuple[str, str]:
        said = run_ranks(GRADIENTS, 3, env={**env, **more}, rank_env=on_hosts("a", "b", "a"), timeout=240)[0].stderr
        return said.partition("gradients go on our engine ")[2].partition(":")[0], said

    forced, said = engine(EVENSTEP_COMM_ENGINE="hosts")
    assert forced == "hosts" and "the all-reduces of a step take" not in said
    assert all(row["way"] != "call" for row in kept(place))

    chosen, said = engine()
    assert said.count("the all-reduces of a step take") == 1, said
    rows = kept(place)
    assert {row["engine"] for row in rows if row["way"] == "call"} == {"hosts", "ucx"}
    assert f"engine {chosen} for 2+1 ranks; " in said, said

    for cheap, ns in (("ucx", 1_000), ("hosts", 4_000_000_000)):
        for row in rows:
            if row["engine"] == "ucx" and row["way"] == "call":
                row["ns"] = ns
        place.write_text(json.dumps({"format": "evenstep-comm-costs-1", "costs": rows}))
        before = [row for row in rows if row["way"] == "call"]
        assert engine()[0] == cheap
        assert [row for row in kept(place) if row["way"] == "call"] == before


def test_the_engine_of_several_hosts_on_one() -> None:
    record = {"ucx": "1.13.1", "why": "", "host": "a"}
    with pytest.raises(_core.EvenstepError, match="=hosts, but all ranks are on one host"):
        hosts.choose("hosts", [0, 0], [record, record])
    assert hosts.choose("hosts", [0, 1], [record, record]) == ("hosts", "")
    with pytest.raises(_core.EvenstepError, match="=hosts, but rank 1 on host a has no UCX"):
        hosts.choose("hosts", [0, 1], [record, {**record, "ucx": ""}])
