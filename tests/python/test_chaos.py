"""evenstep chaos: what survives real faults, what is told where the promise is not kept, and what is refused."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
from run_jobs import go_without
from script_parts import AGENT

Run = Callable[..., subprocess.CompletedProcess[str]]

TRAINING = """
import glob
import mmap
import os
import sys
import time

import torch

import evenstep as es

torch.manual_seed(0)
torch.set_num_threads(1)
inputs = torch.randn(64, 8, dtype=torch.float64)
data = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1, dtype=torch.float64))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = es.prepare(model, optimizer, loader)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
spoiled = b""  # a byte a rank: a gradient of its is to be NaN, or was
if path := os.environ.get("EVENSTEP_CHAOS_NAN"):
    with open(path, "r+b") as file:
        spoiled = mmap.mmap(file.fileno(), 0)
disturbed = "-disturbed" in os.environ["EVENSTEP_RUN_DIR"]
factor, attempts, seconds = (float(word) for word in sys.argv[1:])
for epoch in es.epochs(60):
    if epoch == 30 and disturbed and attempt < attempts:  # half of it is made: the faults come
        until = time.monotonic() + seconds
        while time.monotonic() < until and not any(spoiled[:]):
            bytearray(1 << 26)  # memory of its own, if there is any
            time.sleep(0.05)
    for batch, target in loader:
        loss = torch.nn.functional.mse_loss(model(batch), target)
        if attempt > 0:
            loss = loss * factor
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.fixture
def chaos(program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]) -> Run:
    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(program), "chaos", *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=380,
            check=False,
        )

    return call


def outcome(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# All of these seeds' faults come before the half; the script waits there, in so many attempts, so many seconds at most
# (where a rank or the agent is killed, until that).
KINDS = [
    pytest.param("garbage,twin,nan", 114, 1, 100),
    pytest.param("kill,garbage", 33, 1, 100, marks=pytest.mark.more),
    pytest.param("out-of-memory", 0, 1, 100, marks=pytest.mark.more),
    pytest.param("stop,slow", 33, 1, 10, marks=pytest.mark.more),
    pytest.param("agent", 33, 1, 10, marks=pytest.mark.more),
    pytest.param("bit-flip,torn-write", 33, 2, 100),
]


@pytest.mark.parametrize(("kinds", "seed", "attempts", "seconds"), KINDS)
def test_the_promise_is_kept(
    chaos: Run, script: Callable[[str], str], kinds: str, seed: int, attempts: int, seconds: int
) -> None:
    names = kinds.split(",")
    options = ("-n", "2", "--seed", str(seed), "--faults", str(len(names)), "--kinds", kinds, "--json")
    options += ("--checkpoint-memory", "3")
    if kinds == "out-of-memory":  # the next attempt gives that rank fewer samples, which adds in another order
        options += ("--tolerance", "1e-12")
    done = chaos(*options, script(TRAINING), "1", str(attempts), str(seconds))
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcome(done)
    assert found["kept"] and found["broken"] is None and found["seed"] == seed
    assert found["injected"] == len(names) and {fault["kind"] for fault in found["faults"]} == set(names)
    assert all(fault["injected"] and fault["step"] >= 0 and fault["what"] for fault in found["faults"])
    assert all(fault["what"].endswith("was refused") for fault in found["faults"] if fault["kind"] == "twin"), found
    assert found["tensors"] == 4 and (found["numbers_that_differ"] == 0 or kinds == "out-of-memory")
    for fault in found["faults"]:  # what a restart costs: nothing that a whole checkpoint held
        assert fault["again_from"] == -1 or fault["again_from"] >= fault["held"], fault
        assert fault["again_from"] >= 0 or fault["kind"] not in ("kill", "agent", "bit-flip", "torn-write", "nan"), (
            fault
        )
        assert (fault["noticed_ns"] > 0) != (fault["unnoticed"] is not None) or fault["kind"] not in ("kill", "stop")
        assert fault["agent"] == ("resumed_by_chaos" if fault["kind"] == "agent" else None), fault
        assert fault["hurt"] is (True if fault["kind"] == "out-of-memory" else None), fault


@pytest.mark.more
def test_lack_of_memory_that_hurts_nobody_is_told_as_such(chaos: Run, script: Callable[[str], str]) -> None:
    needs_none = TRAINING.replace("            bytearray(1 << 26)  # memory of its own, if there is any\n", "")
    options = ("-n", "2", "--seed", "0", "--faults", "1", "--kinds", "out-of-memory", "--hold", "0.5")
    done = chaos(*options, script(needs_none), "1", "1", "5")
    assert done.returncode == 0 and needs_none != TRAINING, done.stdout + done.stderr
    assert "; it needed none, or did without" in done.stdout, done.stdout
    assert "out-of-memory hurt 0 of 1 ranks: the others needed none, or did without" in done.stdout, done.stdout


# What chaos damages a checkpoint by is in the way.
IN_THE_WAY = "\n".join(
    ["import os", 'os.makedirs(os.environ["EVENSTEP_RUN_DIR"] + "/chaos-damage/full", exist_ok=True)', TRAINING]
)


def test_a_fault_that_cannot_be_is_passed_over(chaos: Run, script: Callable[[str], str]) -> None:
    options = ("-n", "2", "--seed", "39", "--faults", "2", "--kinds", "kill,torn-write")
    done = chaos(*options, script(IN_THE_WAY), "1", "1", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not here     torn-write     the newest checkpoint could not be damaged: " in done.stdout, done.stdout
    assert "kept under 1 of 2 faults; the others DID NOT COME" in done.stdout, done.stdout
    assert "began again after 1 fault: " in done.stdout, done.stdout


# The script waits at the half until a rank is lost. It goes on by itself then: nobody is started again.
SURVIVED = TRAINING.replace(
    "        while time.monotonic() < until and not any(spoiled[:]):\n            bytearray(1 << 26)  # memory of its own, if there is any\n",
    "        while time.monotonic() < until and es.world_size() == 2:\n            es.barrier()\n",
)


# Each process that the agent has started leaves a file before es.prepare; who is alone waits for that of a third one, and then
# makes its steps slowly until that one takes part.
COMES = """came = os.path.join(os.environ["EVENSTEP_RUN_DIR"], f"came-{os.getppid()}-")
open(f"{came}{os.getpid()}", "w").close()
first = len(glob.glob(f"{came}*")) <= 2
"""
WAITS = """        while es.world_size() == 1 and len(glob.glob(f"{came}*")) < 3 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.1 if es.world_size() == 1 else 0)
"""


@pytest.mark.parametrize(
    ("recovery", "seed"),
    [("replace", 53), pytest.param("shrink", 53, marks=pytest.mark.more)],  # rank 0 is lost
)
def test_the_others_keep_their_processes(chaos: Run, script: Callable[[str], str], recovery: str, seed: int) -> None:
    kinds = ("--faults", "4", "--kinds", "garbage,twin,clock,kill")
    options = ("-n", "2", "--seed", str(seed), *kinds, "--recovery", recovery)
    text = SURVIVED
    if recovery == "replace":  # another process comes before the end, however long it takes to start
        text = text.replace("model, optimizer, loader = es.prepare", COMES + "model, optimizer, loader = es.prepare")
        text = text.replace("attempt < attempts:", "attempt < attempts and first:")  # who comes later does not wait
        text = text.replace("        loss.backward()", WAITS + "        loss.backward()")
    done = chaos(*options, "--tolerance", "1e-12", "--json", script(text), "1", "1", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcome(done)
    assert found["kept"] and found["injected"] == 4 and found["recovery"] == recovery, found
    (kill,) = (fault for fault in found["faults"] if fault["kind"] == "kill")
    assert kill["others"] == "went_on" and kill["at_ns"] < kill["again_ns"] < kill["stepped_ns"], found
    assert kill["joined_ns"] == 0 if recovery == "shrink" else kill["joined_ns"] > kill["again_ns"], found
    assert [fault["what"].endswith("was refused") for fault in found["faults"] if fault["kind"] == "twin"] == [True]


@pytest.mark.more
def test_a_promise_that_is_not_kept_is_told(chaos: Run, script: Callable[[str], str]) -> None:
    """A script that trains otherwise once it was restarted."""
    options = ("-n", "2", "--seed", "5", "--faults", "1", "--kinds", "kill")
    done = chaos(*options, script(TRAINING), "1.5", "1", "100")
    assert done.returncode == 11, done.stdout + done.stderr
    assert "NOT KEPT: " in done.stdout and " numbers differ, most in " in done.stdout
    assert "rank 0 (process " in done.stdout


def test_what_is_refused(chaos: Run, script: Callable[[str], str]) -> None:
    path = script("raise SystemExit(5)")
    cases = [
        ((), 2, "no script was given"),
        (("--kinds", "kil", path), 2, "did you mean kill?"),
        (("--faults", "0", path), 2, "--faults"),
        (("--tolerance", "-1", path), 2, "must not be negative"),
        (("--name", "a/b", path), 2, "cannot name a run"),
        (("--kinds", "partition", path), 2, "one host has no link"),
        (("--replace-leader", path), 2, "--replace-leader is of three hosts"),
        (("--recovery", "grow", path), 2, "is no way to go on"),
        (("--recovery", "shrink", "--spares", "1", path), 2, "--spares 1"),
        (("--recovery", "replace", "--spares", "here:1", path), 2, "a number of them"),
        (("--spares", "1", path), 2, "are of --recovery"),
        (("--hosts", "3", path), 2, "--hosts 3: a number of hosts is of --namespaces"),
        (("--name", "b", path + "x"), 3, "b-undisturbed did not begin: evenstep: script"),
        (("--name", "b", path + "x"), 3, "\n  fix: check the path"),
        (("--name", "a", "-n", "1", path), 7, "a-undisturbed fails without any fault (exit code 5)"),
        (("--name", "a", path), 5, "a-undisturbed exists: chaos runs two jobs of its own"),
    ]
    for words, code, said in cases:
        done = chaos(*words)
        assert (done.returncode, said in done.stderr) == (code, True), done.stderr
        assert ("partition is left out: one host has no link" in done.stdout) == (code != 2), done.stdout


# The script waits at the half until it has seen both faults: the clock of rank 0 jump, and the file that fills the disk.
OF_THE_HOST = TRAINING.replace(
    "        until = time.monotonic() + seconds\n",
    """        until = time.monotonic() + seconds
        while es.is_main() and time.monotonic() < until:
            filled = filled or os.path.exists(filler)
            jumped = any(open(os.environ["EVENSTEP_CHAOS_CLOCK"], "rb").read())
            if filled and jumped and not os.path.exists(filler):
                break
            time.sleep(0.05)
        until = 0
""",
).replace(
    "for epoch in es.epochs(60):\n",
    """filler, filled = os.environ["EVENSTEP_RUN_DIR"] + "/chaos-filler", False
for epoch in es.epochs(60):
    filled = filled or os.path.exists(filler)
""",
)


@pytest.mark.more
@pytest.mark.parametrize("seed", [0, 12])
def test_a_full_disk_and_a_clock_that_jumps(
    chaos: Run, script: Callable[[str], str], small_disk: Callable[..., pathlib.Path], seed: int
) -> None:
    runs = small_disk("24m", "runs")
    options = ("-n", "2", "--seed", str(seed), "--faults", "2", "--kinds", "clock,full-disk", "--json")
    done = chaos(*options, "--name", "a", script(OF_THE_HOST), "1", "1", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcome(done)
    assert found["kept"] and found["injected"] == 2 and found["numbers_that_differ"] == 0, found
    assert not (runs / "a-disturbed" / "chaos-filler").exists()


@pytest.mark.more
def test_a_large_disk_is_not_filled(chaos: Run, script: Callable[[str], str], tmp_path: pathlib.Path) -> None:
    disk = os.statvfs(tmp_path)
    if disk.f_bavail * disk.f_frsize <= 1 << 30:
        pytest.skip("the disk of the tests is small")
    done = chaos("-n", "1", "--seed", "1", "--faults", "1", "--kinds", "full-disk", script(TRAINING), "1", "1", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "others may need them" in done.stdout, done.stdout


@pytest.mark.more
def test_an_agent_that_is_killed_costs_no_step(chaos: Run, script: Callable[[str], str]) -> None:
    options = ("-n", "2", "--seed", "33", "--faults", "3", "--kinds", "agent", "--restart-agent", "--json")
    found = outcome(chaos(*options, script(TRAINING), "1", "1", "10"))
    assert found["kept"] and found["numbers_that_differ"] == 0, found
    came = [fault for fault in found["faults"] if fault["injected"]]
    assert len(came) >= 2, found
    for fault in came:
        assert "; another one went on with its ranks after " in fault["what"] and fault["noticed_ns"] > fault["at_ns"]
        assert fault["again_from"] == -1 and fault["agent"] == "outlasted", fault  # no attempt began


def test_an_agent_that_goes_on_is_not_replaced(chaos: Run, script: Callable[[str], str]) -> None:
    hosts = ("-n", "1", "--namespaces", "--hosts", "3", "--replace-leader")
    done = chaos(*hosts, "--restart-agent", script(TRAINING), "1", "1", "1")
    assert done.returncode == 2 and "give one of them" in done.stderr


# Rank 0 of the second attempt waits until somebody has its port.
ROBBED = TRAINING.replace(
    "torch.manual_seed(0)\n",
    """torch.manual_seed(0)
import socket
last = time.monotonic() + 100
while os.environ["TORCHELASTIC_RESTART_COUNT"] == "1" and time.monotonic() < last:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) == 0:
            break
    time.sleep(0.05)
""",
    1,
)


@pytest.mark.more
def test_a_stolen_port_costs_an_attempt(chaos: Run, script: Callable[[str], str]) -> None:
    options = ("-n", "2", "--seed", "0", "--faults", "1", "--kinds", "stolen-port", "--json")
    done = chaos(*options, script(ROBBED), "1", "1", "100")
    assert done.returncode == 0, done.stdout + done.stderr
    found = outcome(done)
    assert (
        found["kept"]
        and found["injected"] == 1
        and "before the ranks of the next attempt" in found["faults"][0]["what"]
    )


def over_namespaces(chaos: Run, *words: str) -> dict[str, Any]:
    """What comes out on hosts of network namespaces, where these can be made."""
    if os.geteuid() != 0:
        go_without("namespaces", "network namespaces need root")
    done = chaos(*words)
    if done.returncode == 8:
        go_without("namespaces", done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    return outcome(done)


# The second half is slow until another agent has come in the place of rank 0's: after each fault a step is waited for.
FOLLOWED = TRAINING.replace(
    "import time\n", f"import time\n{AGENT}\nwhile not (first := agent()):\n    time.sleep(0.01)\n", 1
).replace(
    "        loss.backward()\n",
    """        loss.backward()
        if epoch >= 30 and disturbed and es.is_main() and agent() in (0, first):
            time.sleep(0.5)
""",
)


def test_agents_of_other_hosts_that_are_killed_cost_no_step(chaos: Run, script: Callable[[str], str]) -> None:
    """By this seed first the second host's, then the leader's."""
    options = (
        "-n",
        "1",
        "--namespaces",
        "--seed",
        "33",
        "--faults",
        "2",
        "--kinds",
        "agent",
        "--restart-agent",
        "--json",
    )
    found = over_namespaces(chaos, *options, script(FOLLOWED), "1", "1", "10")
    assert found["kept"] and found["injected"] == 2 and found["numbers_that_differ"] == 0, found
    assert sum(", of host there; another one" in fault["what"] for fault in found["faults"]) == 1, found
    for fault in found["faults"]:
        assert "; another one went on with its ranks after " in fault["what"] and fault["noticed_ns"] > fault["at_ns"]
        assert fault["again_from"] == -1 and fault["agent"] == "outlasted", fault  # no attempt began


@pytest.mark.more
@pytest.mark.parametrize("recovery", ["restart", "shrink"])
def test_the_leaders_agent_is_started_again_by_chaos_and_others_by_their_hosts(
    chaos: Run, script: Callable[[str], str], recovery: str
) -> None:
    options = ("-n", "1", "--namespaces", "--seed", "33", "--faults", "2", "--kinds", "agent", "--recovery", recovery)
    text = TRAINING if recovery == "restart" else SURVIVED
    found = over_namespaces(chaos, *options, "--tolerance", "1e-12", "--json", script(text), "1", "1", "10")
    assert found["kept"] and found["injected"] == 2, found
    expected = {"resumed_by_chaos", "outlasted" if recovery == "restart" else "host_lost"}
    assert {fault["agent"] for fault in found["faults"]} == expected, found


@pytest.mark.more
def test_a_link_that_is_cut_for_a_while(chaos: Run, script: Callable[[str], str]) -> None:
    """Two hosts of network namespaces; the script waits at the half until it is ended."""
    options = ("-n", "1", "--namespaces", "--seed", "0", "--faults", "1", "--kinds", "partition", "--json")
    found = over_namespaces(chaos, *options, script(TRAINING), "1", "1", "100")
    (fault,) = found["faults"]
    assert found["kept"] and fault["injected"] and found["numbers_that_differ"] == 0, found
    assert fault["noticed_ns"] > fault["at_ns"], found


@pytest.mark.more
@pytest.mark.parametrize("recovery", ["restart", "shrink"])
def test_hosts_whose_clocks_differ_by_hours(chaos: Run, script: Callable[[str], str], recovery: str) -> None:
    """The second host's clock jumps, then a rank is lost: checkpoints, leases, waits and generations go by no clock of the day."""
    options = (
        "-n",
        "1",
        "--namespaces",
        "--seed",
        "102",
        "--faults",
        "2",
        "--kinds",
        "clock,kill",
        "--recovery",
        recovery,
    )
    text = TRAINING if recovery == "restart" else SURVIVED
    found = over_namespaces(chaos, *options, "--tolerance", "1e-12", "--json", script(text), "1", "1", "100")
    assert found["kept"] and found["injected"] == 2, found
    assert any(fault["what"].startswith("the clock of host 2 is ") for fault in found["faults"]), found
    if recovery == "shrink":
        assert [fault["others"] for fault in found["faults"] if fault["kind"] == "kill"] == ["went_on"], found


# Its second half is slow, so that all faults come while it trains: until two attempts have ended by them, or two ranks are lost.
LED = TRAINING.replace(
    "        loss.backward()\n",
    """        loss.backward()
        if epoch >= 30 and disturbed and attempt < attempts and es.world_size() > 1:
            time.sleep(0.5)
""",
)


@pytest.mark.more
@pytest.mark.parametrize("replaces", [True, False])
def test_the_leaders_own_link_is_cut(chaos: Run, script: Callable[[str], str], replaces: bool) -> None:
    """The others go on under another leader, and the first one ends when it hears of it; or all wait, and begin again with it."""
    hosts = ("-n", "1", "--namespaces", "--hosts", "3", *(("--replace-leader",) if replaces else ()))
    faults = ("--seed", "42", "--faults", "1", "--kinds", "partition", "--tolerance", "1e-12", "--json")
    found = over_namespaces(chaos, *hosts, *faults, script(LED), "1", "1", "0")
    (fault,) = found["faults"]
    assert found["kept"] and "the link of host here, which leads, for " in fault["what"], found
    if replaces:  # on a machine that is slower than the cut the first one may lead again
        assert "; process " in fault["what"] or "it leads again" in fault["what"], found


@pytest.mark.more
@pytest.mark.parametrize("recovery", ["restart", "shrink"])
def test_another_host_takes_the_leaders_place(chaos: Run, script: Callable[[str], str], recovery: str) -> None:
    """The agent of the first of three hosts is killed first, although this seed has it last, then a rank under the next leader."""
    hosts = ("-n", "1", "--namespaces", "--hosts", "3", "--replace-leader", "--recovery", recovery)
    faults = ("--seed", "42", "--faults", "3", "--kinds", "agent,kill,garbage", "--tolerance", "1e-12", "--json")
    found = over_namespaces(chaos, *hosts, *faults, script(LED), "1", "2", "0")
    assert found["kept"] and found["injected"] == 3, found
    first, *others = found["faults"]
    assert first["kind"] == "agent" and "another host takes its place; process " in first["what"], found
    assert first["agent"] == "replaced", first
    assert first["noticed_ns"] > first["at_ns"] and all(one["at_ns"] > first["noticed_ns"] for one in others), found
