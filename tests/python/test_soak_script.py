"""scripts/soak.py: sittings that go on from one another."""

import argparse
import importlib.util
import sys

import pytest


@pytest.fixture
def soak(tree, monkeypatch):
    spec = importlib.util.spec_from_file_location("soak", tree / "scripts" / "soak.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "soak", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    return module


def test_a_line_that_was_cut_off_is_left_out(soak, tmp_path):
    kept = tmp_path / "runs.jsonl"
    args = argparse.Namespace(go_on=str(kept))

    def take_up():
        sitting = soak.Soak(tmp_path, args)
        sitting._take_up()
        return sitting

    run = soak.Run(seed=3, ranks=2, hosts=1, outcome={"faults": []}, wrong="")
    sitting = take_up()
    sitting._keep(run)
    whole = kept.read_bytes()
    for length in (1, len(whole) - 1):
        kept.write_bytes(whole + whole[:length])
        sitting = take_up()
        assert sitting.runs == [run] and sitting.earlier == 1
        sitting._keep(run)
        assert take_up().runs == [run, run]
    kept.write_bytes(whole[:5])
    assert take_up().runs == [] and kept.read_bytes() == b""


@pytest.mark.parametrize("every", [0, 2, 6])
def test_runs_of_one_host_and_of_several_recover_by_turns(soak, tmp_path, every):
    sitting = soak.Soak(
        tmp_path, argparse.Namespace(go_on=None, several_hosts=every, recovery="restart,shrink,replace")
    )
    several = [seed for seed in range(90) if every and seed % every == every - 1]
    for seeds in (several, [seed for seed in range(90) if seed not in several]):
        modes = [sitting._recovery(seed) for seed in seeds]
        assert modes == list(soak.RECOVERIES * 30)[: len(modes)]


def test_states_are_shared_by_ranks_of_a_host_with_each_way_to_go_on(soak, tmp_path):
    """Every run on several hosts: each optimizer meets each recovery on two hosts and on three; es.optim of two hosts has two ranks
    on each."""
    args = argparse.Namespace(
        go_on=None,
        several_hosts=1,
        recovery="restart,shrink,replace",
        optimizers="torch,es.optim",
        kinds=None,
        together_hosts=14,
        hold=1,
        epochs=6,
    )
    sitting = soak.Soak(tmp_path, args)
    met, led = set(), set()
    for seed in range(48):
        command, ranks, hosts = sitting._command(seed, "run")
        optimizer = sitting._optimizer(seed)
        met.add((optimizer, sitting._recovery(seed), hosts))
        led.add((sitting._recovery(seed), hosts, "--replace-leader" in command))
        assert command[-1] == optimizer and ranks % hosts == 0
        assert command[command.index("-n") + 1] == str(ranks // hosts)
        assert ranks == 4 or hosts == 3 or optimizer == "torch"
    assert len(met) == 2 * 3 * 2
    assert led == {(way, 3, leads) for way in soak.RECOVERIES for leads in (False, True)} | {
        (way, 2, False) for way in soak.RECOVERIES
    }


def test_leaders_are_lost_in_each_way_with_each_recovery(soak, tree, monkeypatch):
    monkeypatch.syspath_prepend(tree / "scripts")
    leader = importlib.import_module("soak_leader")
    monkeypatch.delitem(sys.modules, "soak_leader")
    recoveries, losses = list(soak.RECOVERIES), leader.LOSSES
    optimizers = list(soak.OPTIMIZERS)
    plans = [leader.plan(seed, recoveries, optimizers) for seed in range(len(recoveries) * len(losses))]
    assert {(one.recovery, one.loss) for one in plans} == {(a, b) for a in recoveries for b in losses}
    assert all(0 < one.at[0] < one.at[1] < one.at[2] < 1 for one in plans) and plans[3] == leader.plan(
        3, recoveries, optimizers
    )
    assert {(one.recovery, one.optimizer) for one in plans} == {(a, b) for a in recoveries for b in optimizers}
    assert all(one.ranks == 2 for one in plans if one.optimizer == "es.optim")
