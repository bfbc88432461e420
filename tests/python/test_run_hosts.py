"""`evenstep run --hosts`: jobs of two hosts, which are network namespaces of this machine (root and ip; skipped without)."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
from run_jobs import Job, alive, compile_library, end_all, end_soon, go_without, wait_until, write_checkpoint
from script_parts import TRAINING

Script = Callable[[str], str]

# As ssh: a host's name, a program and its words. What it starts outlives it, as it does on another machine.
SHELL = """#!/bin/sh
name=$1
shift
exec 3<&0
EVENSTEP_HOST_ID=$name ip netns exec "$name" {before} "$@" <&3 3<&- &
wait $!
"""


def _missing() -> str:
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip (apt-get install iproute2)"
    probe = f"evenr-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True)
    return "" if made.returncode == 0 else f"no network namespaces: {made.stderr.strip()}"


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


def await_link(name: str) -> None:
    """Until the namespace's eth0 carries packets: a moment after it was asked for."""

    def carries() -> bool:
        shown = subprocess.run(["ip", "-n", name, "link", "show", "eth0"], capture_output=True, text=True).stdout
        return "LOWER_UP" in shown and "state UP" in shown

    wait_until(carries)


@pytest.fixture(scope="module")
def names() -> Iterator[tuple[str, str]]:
    """Two hosts on one wire: 10.79.0.1 and 10.79.0.2."""
    if why := _missing():
        go_without("namespaces", why)
    both = (f"evenr-{os.getpid()}-a", f"evenr-{os.getpid()}-b")
    try:
        for name in both:
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"link add eth0 netns {both[0]} type veth peer name eth0 netns {both[1]}")
        for number, name in enumerate(both):
            _ip(f"-n {name} addr add 10.79.0.{number + 1}/24 dev eth0")
            _ip(f"-n {name} link set eth0 up")
        for name in both:
            await_link(name)
        yield both
    finally:
        for name in both:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Hosts:
    """Starts jobs on both hosts."""

    def __init__(
        self, names: tuple[str, str], program: pathlib.Path, folder: pathlib.Path, environment: dict[str, str]
    ) -> None:
        self.names, self.program, self.folder, self.environment = names, program, folder, environment
        self.jobs: list[Job] = []

    def shell(self, before: str = "") -> str:
        path = self.folder / "shell.sh"
        path.write_text(SHELL.format(before=before))
        path.chmod(0o755)
        return str(path)

    def start(self, *words: str, ranks: str = "", before: str = "", monitor: bool = False) -> Job:
        here, there = self.names
        command = ["ip", "netns", "exec", here, "env", f"EVENSTEP_HOST_ID={here}", str(self.program), "run"]
        command += ["--hosts", f"{here}{ranks},{there}{ranks}", "--ssh", self.shell(before), "-n", "1", "--no-pin"]
        command += [] if monitor else ["--no-monitor"]
        self.jobs.append(Job([*command, *words], self.folder, self.environment))
        return self.jobs[-1]

    def run(self, *words: str, ranks: str = "", before: str = "", monitor: bool = False) -> tuple[int, str]:
        return self.start(*words, ranks=ranks, before=before, monitor=monitor).finish()

    def agents(self) -> list[int]:
        """Processes of `evenstep agent` on the other host; their shells and guardians are none."""
        found, host = [], f"EVENSTEP_HOST_ID={self.names[1]}".encode()
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    environment = (entry / "environ").read_bytes().split(b"\0")
                    parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                except OSError:
                    continue
                if words[0].endswith(b"/evenstep") and words[1:2] == [b"agent"] and host in environment:
                    found.append((int(entry.name), parent))
        numbers = [number for number, _ in found]
        return [number for number, parent in found if parent not in numbers]


@pytest.fixture
def hosts(
    names: tuple[str, str], program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]
) -> Iterator[Hosts]:
    both = Hosts(names, program, tmp_path, environment)
    yield both
    end_all(both.jobs, both.agents)


PLACE = """
names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")
print("place", *(os.environ[name] for name in names), os.environ["GLOO_SOCKET_IFNAME"], flush=True)
"""
SAYS_ITS_PLACE = TRAINING + PLACE + "train_and_compare()\n"


# Each host's agent looks once a second: a rank stays until the history has what the kernel says of all of them.
USAGE = "SELECT DISTINCT rank FROM usage WHERE cpu_seconds > 0 AND rss_bytes > 1e6 ORDER BY rank"
STAYS = f"""
import contextlib, sqlite3, time
with contextlib.closing(sqlite3.connect(sys.argv[1])) as history:
    while len(history.execute("{USAGE}").fetchall()) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
def test_two_hosts_train_as_one_device_does(hosts: Hosts, script: Script, tmp_path: pathlib.Path, ranks: int) -> None:
    trains = script(SAYS_ITS_PLACE + STAYS)
    words = ("--name", "a", "--log-rank", "all", trains, str(tmp_path / "runs/a/run.db"))
    code, text = hosts.run(*words, ranks=f":{ranks}" if ranks > 1 else "", monitor=True)
    assert code == 0, text
    assert f"{2 * ranks} ranks on 2 hosts: {hosts.names[0]} {ranks}, {hosts.names[1]} {ranks}" in text
    for rank in range(2 * ranks):
        host, local = divmod(rank, ranks)
        label = f"rank {rank} on {hosts.names[1]}" if host else f"rank {rank}"
        assert f"[{label}] place {rank} {local} {ranks} {2 * ranks} {host} 2 10.79.0.1 eth0" in text
        found = re.search(rf"\[{label}\] apart (\S+) after 18 steps", text)
        assert found and float(found[1]) < 1e-12, text
        assert "apart" in (tmp_path / f"runs/a/logs/rank-{rank}.log").read_text()
    with sqlite3.connect(tmp_path / "runs/a/run.db") as database:  # those of the other host came over the connection
        counted = dict(database.execute("SELECT rank, COUNT(DISTINCT step) FROM steps GROUP BY rank").fetchall())
        seen = [rank for (rank,) in database.execute(USAGE)]
    assert counted == dict.fromkeys(range(2 * ranks), 18)
    assert seen == list(range(2 * ranks))


# Rank 1, on the other host, says its number and waits in the first attempt.
WAITING = """
    import os, time
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    print("attempt", attempt, "process", os.getpid(), flush=True)
    while attempt == "0":
        time.sleep(0.01)
"""


def _processes(job: Job) -> dict[int, int]:
    """The ranks' processes, once both have said theirs."""
    found = {}
    for rank in (0, 1):
        found[rank] = int(job.wait_for(rf"\[rank {rank}[^\]]*\] attempt 0 process (\d+)")[0])
    return found


def test_a_rank_killed_there_restarts_both(hosts: Hosts, script: Script) -> None:
    job = hosts.start("--max-restarts", "1", "--log-rank", "all", script(WAITING))
    ranks = _processes(job)
    os.kill(ranks[1], signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    cause = f"rank 1 (cpu on {hosts.names[1]}, process {ranks[1]}) was killed by SIGKILL"
    assert cause in text and "restart 1 of 1" in text
    assert not alive(ranks[0])
    assert len(re.findall("attempt 1 process", text)) == 2


def test_an_error_there_is_told_with_its_line(hosts: Hosts, script: Script) -> None:
    name = script("""
        import os, time
        if os.environ["RANK"] == "1":
            {}["weights"]
        time.sleep(600)
    """)
    code, text = hosts.run(name)
    assert code == 1
    assert re.search(rf"rank 1 \(cpu on {hosts.names[1]}, process \d+\) exited with code 1: KeyError: 'weights'", text)
    assert "(train.py:4)" in text


def test_an_agent_killed_there_is_started_again(hosts: Hosts, script: Script) -> None:
    job = hosts.start("--max-restarts", "1", "--log-rank", "all", script(WAITING))
    ranks = _processes(job)
    (agent,) = hosts.agents()
    os.kill(agent, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert f"host {hosts.names[1]} is lost" in text and f"host {hosts.names[1]}: its agent is started again" in text
    assert f"rank 1 (cpu on {hosts.names[1]}, process {ranks[1]}) was lost with its host" in text
    assert len(re.findall("attempt 1 process", text)) == 2


def test_the_leaders_death_ends_all(hosts: Hosts, script: Script) -> None:
    job = hosts.start("--log-rank", "all", script(WAITING))
    ranks = _processes(job)
    (agent,) = hosts.agents()
    os.kill(job.process.pid, signal.SIGKILL)  # ip and env have become evenstep
    wait_until(lambda: not any(alive(process) for process in (agent, *ranks.values())))
    job.finish()


def test_a_leader_is_started_again(hosts: Hosts, script: Script) -> None:
    hosts.environment = hosts.environment | {"EVENSTEP_RESTART_AGENT": "anew"}
    job = hosts.start("--log-rank", "all", script(WAITING))
    ranks = _processes(job)
    leader = int(pathlib.Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    assert leader != job.process.pid
    os.kill(leader, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0 and "the agent before was killed: restart 1 of 3" in text, text
    assert len(re.findall("attempt 1 process", text)) == 2
    assert not any(alive(process) for process in ranks.values())


def test_ctrl_c_ends_all(hosts: Hosts, script: Script) -> None:
    job = hosts.start("--log-rank", "all", script(WAITING))
    ranks = _processes(job)
    (agent,) = hosts.agents()
    os.kill(job.process.pid, signal.SIGINT)
    code, text = job.finish()
    assert code == 130, text
    assert end_soon((agent, *ranks.values()))


def test_a_host_that_is_cut_off_is_named_and_ends_its_part(hosts: Hosts, script: Script) -> None:
    job = hosts.start("--max-restarts", "0", "--log-rank", "all", script(WAITING))
    ranks = _processes(job)
    (agent,) = hosts.agents()
    _ip(f"-n {hosts.names[1]} link set eth0 down")
    try:
        code, text = job.finish()
        assert code == 7, text
        assert f"host {hosts.names[1]} is lost: the connection to 10.79.0.2 broke" in text
        assert f"rank 1 (cpu on {hosts.names[1]}, process {ranks[1]}) was lost with its host" in text
        wait_until(lambda: not any(alive(process) for process in (agent, *ranks.values())))
    finally:
        _ip(f"-n {hosts.names[1]} link set eth0 up")


# Rank 1 is killed in step 10 of the first attempt.
KILLED_ONCE = """
    import os, signal
    import torch
    import evenstep as es

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(72, 6), torch.randn(72, 2))
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def train(prepare, killed):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(data, batch_size=12)
        model, optimizer, loader = prepare(model, optimizer, loader)
        if killed:
            print("began with step", es.step(), flush=True)
        for _ in es.epochs(3) if killed else range(3):
            for x, y in loader:
                if killed and first and es.step() == 10 and os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    together = train(es.prepare, True)
    alone = train(lambda *parts: parts, False)
    apart = max(float((a - b).abs().max()) for a, b in zip(together, alone))
    print(f"apart {apart:.1e} after {es.step()} steps", flush=True)
"""


@pytest.mark.parametrize("hours", [5, pytest.param(-5, marks=pytest.mark.more)])
def test_hosts_whose_clocks_differ(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, tree: pathlib.Path, hours: int
) -> None:
    """A rank of the host with the other clock is lost: what was trained, and when, is as if there were one clock."""
    compile_library(tmp_path / "clock.so", tree / "cli/chaos_clock_preload.c")
    (tmp_path / "clock").write_bytes(struct.pack("=q", hours * 3600 * 10**9) * 5)  # of whoever is there
    says = 'import sys, time\n    print("hours", round((time.time() - float(sys.argv[1])) / 3600), flush=True)\n    '
    began = time.time()
    words = ["--name", "a", "--log-rank", "all", "--checkpoint-every", "4", "--max-restarts", "1"]
    before = f"env LD_PRELOAD={tmp_path}/clock.so EVENSTEP_CHAOS_CLOCK={tmp_path}/clock"
    training = script(KILLED_ONCE.replace("import os,", f"{says}import os,", 1))
    code, text = hosts.run(*words, training, str(began), before=before, monitor=True)
    assert code == 0, text
    assert text.count("[rank 0] hours 0") == 2 and text.count(f"[rank 1 on {hosts.names[1]}] hours {hours}") == 2
    assert re.search(r"restart 1 of 1 from \S+/step-00000008", text) and text.count("began with step 8") == 2
    found = re.findall(r"apart (\S+) after 18 steps", text)
    assert len(found) == 2 and all(float(each) < 1e-12 for each in found), text
    with sqlite3.connect(tmp_path / "runs/a/run.db") as history:
        ((ranks, first, last),) = history.execute("SELECT COUNT(DISTINCT rank), MIN(end_ns), MAX(end_ns) FROM steps")
    assert ranks == 2 and last - first < 3600 * 10**9


@pytest.mark.parametrize("taken", [False, pytest.param(True, marks=pytest.mark.more)])
def test_a_host_without_the_folder_of_checkpoints_gets_the_one_to_begin_from(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path, taken: bool
) -> None:
    """Each host has a disk of its own: nothing under `runs` is seen by both. `taken`: another training's checkpoint has
    its name there."""
    if taken:
        other = tmp_path / "there/a/checkpoints/step-00000008"
        write_checkpoint(other)
    over = tmp_path / "over.sh"
    over.write_text('#!/bin/sh\nmkdir -p runs there && mount --bind there runs && exec "$@"\n')
    over.chmod(0o755)
    words = ["--name", "a", "--log-rank", "all", "--checkpoint-every", "4", "--max-restarts", "1", script(KILLED_ONCE)]
    code, text = hosts.run(*words, before=f"unshare -m {over}")
    assert code == 0, text
    folder = tmp_path / "runs/a/checkpoints/step-00000008"
    assert f"host {hosts.names[1]} does not have {folder}: it is sent there" in text
    assert f"restart 1 of 1 from {folder}" in text
    assert len(re.findall("began with step 8", text)) == 2
    found = re.findall(r"apart (\S+) after 18 steps", text)
    assert len(found) == 2 and all(float(each) < 1e-12 for each in found), text
    there = tmp_path / ("there/a/received" if taken else "there/a/checkpoints")
    assert [path.name for path in there.iterdir()] == ["step-00000008"]
    for path in folder.iterdir():
        assert (there / "step-00000008" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.more
def test_a_host_lost_while_it_gets_the_checkpoint_is_started_again(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    """Its agent is killed as soon as the first of the files comes."""
    ballast = '    model.register_buffer("ballast", torch.zeros(1 << 23))  # takes its time to be sent\n'
    source = KILLED_ONCE.replace("        optimizer = torch.optim", f"    {ballast}        optimizer = torch.optim")
    assert source != KILLED_ONCE
    over = tmp_path / "over.sh"
    over.write_text(
        "#!/bin/sh\nmkdir -p runs there && mount --bind there runs\n"
        "mkdir killed 2>/dev/null && (until ls runs/a/checkpoints | grep -q partial; do sleep 0.005; done; kill -9 $$) "
        '>/dev/null 2>&1 </dev/null &\nexec "$@"\n'
    )
    over.chmod(0o755)
    words = ["--name", "a", "--log-rank", "all", "--checkpoint-every", "4", "--max-restarts", "1", script(source)]
    code, text = hosts.run(*words, before=f"unshare -m {over}")
    assert code == 0, text
    assert f"host {hosts.names[1]} is lost" in text
    assert text.count(f"host {hosts.names[1]} does not have {tmp_path / 'runs/a/checkpoints/step-00000008'}") == 2
    assert "restart 1 of 1" in text and len(re.findall("began with step 8", text)) == 2


def test_another_file_there_is_named(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    name = script("import model")
    script("LAYERS = 2", "model.py")
    script("LAYERS = 3", "other.py")
    over = tmp_path / "over.sh"
    over.write_text('#!/bin/sh\nmount --bind other.py model.py && exec "$@"\n')
    over.chmod(0o755)
    code, text = hosts.run(name, before=f"unshare -m {over}")
    assert code == 7
    assert f"host {hosts.names[1]} differs from this one: model.py is another one there (" in text
    assert re.search(r"there \([0-9a-f]{16}, here [0-9a-f]{16}\)", text)
    assert not (tmp_path / "runs").exists()


@pytest.mark.more
def test_modules_and_packages_are_compared(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """What the script imports from elsewhere, by its own package, and a file of that package."""
    name = script("import layers.deep.block")
    for path, text in {
        "layers/deep/block.py": "import extra_of_test, absent_on_both",
        "layers/other.py": "SIZE = 2",
        "data/a.py.txt": "",
        "lib/extra_of_test.py": "VALUE = 1",
        "changed.py.there": "SIZE = 3",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    over = tmp_path / "over.sh"
    over.write_text(
        '#!/bin/sh\nmount --bind changed.py.there layers/other.py && mount -t tmpfs none lib && exec "$@"\n'
    )
    over.chmod(0o755)
    hosts.environment["PYTHONPATH"] = f"{tmp_path / 'lib'}:{hosts.environment.get('PYTHONPATH', '')}"
    code, text = hosts.run(name, before=f"unshare -m {over}")
    assert code == 7
    assert "module extra_of_test, which the script imports, is missing there (" in text
    assert re.search(r"layers/other.py is another one there \([0-9a-f]{16}, here [0-9a-f]{16}\)", text)
    assert "absent_on_both" not in text


def test_a_file_that_is_there_alone_is_named(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    name = script("import numbers")
    there = tmp_path / "there"
    there.mkdir()
    (there / name).write_text((tmp_path / name).read_text())
    (there / "numbers.py").write_text("LEFT = 'from another day'")
    over = tmp_path / "over.sh"
    over.write_text(f'#!/bin/sh\nmount --bind {there} {tmp_path} && exec "$@"\n')
    over.chmod(0o755)
    code, text = hosts.run(name, before=f"unshare -m {over}")
    assert code == 7
    assert f"host {hosts.names[1]} differs from this one: numbers.py is there alone" in text


def test_what_the_command_names_is_looked_for_there(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    for path, text in {"images/1": "", "words.txt": "here", "other.txt": "else"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    over = tmp_path / "over.sh"
    over.write_text('#!/bin/sh\nmount -t tmpfs none images && mount --bind other.txt words.txt && exec "$@"\n')
    over.chmod(0o755)
    words = ("--data=images", str(tmp_path / "words.txt"), "nothing")
    differs = (
        f"host {hosts.names[1]} differs from this one in what the command names: folder images holds nothing there; "
        f"{tmp_path / 'words.txt'} has another content there"
    )
    code, text = hosts.run(script("print('it ran')"), *words, before=f"unshare -m {over}")
    assert code == 0 and f"evenstep: {differs}; fix: copy it there" in text and text.count("it ran") == 1, text
    shutil.rmtree(tmp_path / "runs")
    hosts.environment["EVENSTEP_CHECK_DATA"] = "strict"
    code, text = hosts.run(script("print('it ran')"), *words, before=f"unshare -m {over}")
    assert code == 7 and differs in text and "it ran" not in text, text
    assert not (tmp_path / "runs").exists()


def test_who_has_not_the_key_is_not_let_in(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    """The agent gets another key: what it says is not believed, and it believes nobody."""
    over = tmp_path / "over.sh"
    over.write_text('#!/bin/sh\nhead -n 1 | sed \'s/"key":"..../"key":"0123/\' | "$@"\n')
    over.chmod(0o755)
    code, text = hosts.run(script("raise SystemExit('it ran')"), before=str(over))
    assert code == 7, text
    assert f"host {hosts.names[1]}: its agent ended before it came here" in text and "it ran" not in text


def test_the_key_is_in_no_arguments_and_no_environment(hosts: Hosts, script: Script, tmp_path: pathlib.Path) -> None:
    over = tmp_path / "over.sh"
    over.write_text('#!/bin/sh\ntee invitation | "$@"\n')
    over.chmod(0o755)
    job = hosts.start("--log-rank", "all", script(WAITING), before=str(over))
    _processes(job)
    found = re.search(r'"key":"([0-9a-f]{64})"', (tmp_path / "invitation").read_text())
    assert found
    for entry in pathlib.Path("/proc").iterdir():
        for name in ("cmdline", "environ"):
            try:
                assert found[1].encode() not in (entry / name).read_bytes()
            except OSError:
                continue
    os.kill(job.process.pid, signal.SIGINT)
    assert job.finish()[0] == 130


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hosts", "a,-oProxyCommand=x", "t.py"], "not the name of a host"),
        (["--hosts", "a,b:0", "t.py"], "not a number of ranks"),
        (["--hosts", "a,a", "t.py"], "a host is named twice"),
        (["--hosts", "a,b", "--devices", "cpu:0", "t.py"], "--devices names devices of this host"),
        (["--ssh", "rsh", "t.py"], "--ssh is of several hosts"),
        (["--replace-leader", "t.py"], "--replace-leader is of several hosts"),
        (["--checkpoint-copies", "1", "t.py"], "--checkpoint-copies is of several hosts"),
        (["--checkpoint-copies", "2", "--hosts", "a,b", "t.py"], "there are 1 other hosts"),
        (["--replace-leader", "--hosts", "a,b", "t.py"], "--replace-leader is of three hosts"),
        (["--replace-leader", "--no-replace-leader", "--hosts", "a,b,c", "t.py"], "--replace-leader and --no-replace-"),
        (["--witness", "w", "t.py"], "--witness is of several hosts"),
        (["--witness", "w", "--hosts", "a,b,c", "t.py"], "--witness is of two hosts"),
        (["--witness", "b", "--hosts", "a,b", "t.py"], "--witness b has ranks, too"),
        (["--witness", "-w", "--hosts", "a,b", "t.py"], "--witness -w: not the name of a host"),
    ],
)
def test_wrong_lists_are_named(
    program: pathlib.Path, tmp_path: pathlib.Path, script: Script, words: list[str], said: str
) -> None:
    script("", "t.py")
    result = subprocess.run([str(program), "run", *words], cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert result.returncode == 2 and said in result.stderr


def test_a_list_in_another_order_is_told(program: pathlib.Path, tmp_path: pathlib.Path, script: Script) -> None:
    script("", "t.py")
    own = socket.gethostname().partition(".")[0]
    for hosts, told in ((f"elsewhere,me@{own}.cluster", True), (f"{own},elsewhere", False), ("here,there", False)):
        words = [str(program), "run", "--hosts", hosts, "--ssh", "false", "t.py"]
        result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=150)
        assert result.returncode == 7 and (f"called {own}" in result.stderr) == told, result.stderr
        assert ("none on a host elsewhere; name this host first" in result.stderr) == told


def test_ranks_there_have_an_empty_standard_input(hosts: Hosts, script: Script) -> None:
    """Theirs is the agent's, which is a pipe from here that stays open."""
    name = script("import os, sys; print('rank', os.environ['RANK'], 'reads', repr(sys.stdin.read()))")
    code, text = hosts.run("--log-rank", "all", name)
    assert code == 0 and "rank 0 reads ''" in text and "rank 1 reads ''" in text, text


@pytest.mark.parametrize("outlasts", [False, True])
def test_an_agent_looks_for_its_leader_for_as_long_as_that_wants_it(program: pathlib.Path, outlasts: bool) -> None:
    """A leader that is busy may not answer at first; one that has ended holds the agent's standard input no more."""
    with socket.create_server(("127.0.0.1", 0)) as leader:
        words = {"key": "0" * 64, "host": 1, "port": leader.getsockname()[1], "outlasts": outlasts}
        words |= {"patience_seconds": 3600, "addresses": ["127.0.0.1"]}
        with subprocess.Popen([str(program), "agent"], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
            assert agent.stdin is not None
            agent.stdin.write(json.dumps(words).encode() + b"\n")
            agent.stdin.flush()
            for _ in range(3):
                leader.accept()[0].close()
            agent.stdin.close()
            assert agent.wait(150) == 7


@pytest.mark.more
def test_a_restart_goes_on_from_the_checkpoint_and_ends_the_same(hosts: Hosts, script: Script) -> None:
    dies = """
            if prepare is es.prepare and (es.step(), os.environ["RANK"]) == (12, "1") and restarts == "0":
                os.kill(os.getpid(), 9)
"""
    source = TRAINING.replace("optimizer.step()\n", f"optimizer.step(){dies}", 1)
    source += 'restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]\ntrain_and_compare(es.epochs(3))\n'
    code, text = hosts.run("--checkpoint-every", "5", "--log-rank", "all", script(source))
    assert code == 0, text
    assert re.search(r"restart 1 of 3 from \S+/step-00000010\n", text), text
    found = re.findall(r"apart (\S+) after 18 steps", text)
    assert len(found) == 2 and max(float(one) for one in found) < 1e-12, text
