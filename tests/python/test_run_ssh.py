"""`evenstep run --hosts` over ssh itself: two hosts, which are network namespaces of this machine, the second with an sshd that has
throw-away keys (root, ip, OpenSSH's server; skipped without)."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
import test_run_hosts
from run_jobs import Job, alive, end_all, end_soon, go_without, wait_until

Script = Callable[[str], str]

two_names = test_run_hosts.names

ADDRESS, PORT = "10.79.0.2", 2222
SERVER = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")

# The server wants a folder for those that it trusts least; it gets a /run of its own.
OVER_RUN = 'mount -t tmpfs none /run && mkdir /run/sshd && exec "$@"'

SERVER_SAYS = """
ListenAddress {address}:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
SetEnv {variables}
"""

USER_SAYS = """
Host there
  HostName {address}
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
"""


class Hosts(test_run_hosts.Hosts):
    """Starts jobs on both, with the words behind `ssh` that a user would give; None: by the configuration alone."""

    def start_over(self, ssh: str | None, *words: str) -> Job:
        here = self.names[0]
        command = ["ip", "netns", "exec", here]
        if ssh is None:
            over = f'mount --bind {self.folder}/ssh_config /etc/ssh/ssh_config && exec "$@"'
            command += ["unshare", "-m", "sh", "-c", over, "sh"]
        command += ["env", f"EVENSTEP_HOST_ID={here}", str(self.program), "run", "-n", "1", "--no-pin", "--no-monitor"]
        command += ["--hosts", f"{here},there"] if ssh is None else ["--hosts", f"{here},{ADDRESS}", "--ssh", ssh]
        self.jobs.append(Job([*command, *words], self.folder, self.environment))
        return self.jobs[-1]

    def ssh(self, key: str = "user_key", known: str = "known_hosts") -> str:
        return f"ssh -p {PORT} -i {key} -o IdentitiesOnly=yes -o UserKnownHostsFile={known}"


def _make_key(path: pathlib.Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def _variables(name: str) -> str:
    """What ranks and agents of a test have by inheritance, sshd's children have from its configuration."""
    given = {"EVENSTEP_HOST_ID": name, "PATH": os.environ["PATH"]}
    given |= {key: os.environ[key] for key in ("EVENSTEP_TEST_MARK", "PYTHONPATH", "TMPDIR") if key in os.environ}
    return " ".join(f'"{key}={value}"' for key, value in given.items())


@pytest.fixture
def hosts(
    two_names: tuple[str, str], program: pathlib.Path, tmp_path: pathlib.Path, environment: dict[str, str]
) -> Iterator[Hosts]:
    if SERVER is None or shutil.which("ssh") is None:
        go_without("ssh", "no sshd (apt-get install openssh-server)")
    if re.search(r"^root:!", pathlib.Path("/etc/shadow").read_text(), re.MULTILINE):
        go_without("ssh", "root's account is locked, and this sshd asks no PAM that would let a key in all the same")
    both = Hosts(two_names, program, tmp_path, environment)
    for key in ("host_key", "user_key", "other_key"):
        _make_key(tmp_path / key)
    places = {"address": ADDRESS, "port": PORT, "folder": tmp_path}
    (tmp_path / "sshd_config").write_text(SERVER_SAYS.format(**places, variables=_variables(two_names[1])))
    (tmp_path / "ssh_config").write_text(USER_SAYS.format(**places))
    (tmp_path / "known_hosts").write_text(f"[{ADDRESS}]:{PORT} {(tmp_path / 'host_key.pub').read_text()}")
    log = tmp_path / "sshd.log"
    command = ["ip", "netns", "exec", two_names[1], "unshare", "-m", "sh", "-c", OVER_RUN, "sh"]
    server = subprocess.Popen([*command, SERVER, "-D", "-f", str(tmp_path / "sshd_config"), "-E", str(log)])
    try:
        wait_until(lambda: server.poll() is not None or (log.exists() and "Server listening" in log.read_text()))
        assert server.poll() is None, log.read_text() if log.exists() else "sshd did not start"
        yield both
    finally:
        end_all(both.jobs, both.agents)
        server.terminate()
        server.wait()


def test_two_hosts_train_as_one_device_does_by_the_users_configuration(
    hosts: Hosts, script: Script, tmp_path: pathlib.Path
) -> None:
    if not pathlib.Path("/etc/ssh/ssh_config").exists():
        pytest.skip("no configuration of ssh in /etc, in whose place another one could be")
    job = hosts.start_over(None, "--name", "a", "--log-rank", "all", script(test_run_hosts.TRAINING))
    code, text = job.finish()
    assert code == 0, text + (tmp_path / "sshd.log").read_text()
    assert f"2 ranks on 2 hosts: {hosts.names[0]} 1, there 1" in text
    for rank, label in enumerate(("rank 0", "rank 1 on there")):
        assert f"[{label}] place {rank} 0 1 2 {rank} 2 10.79.0.1 eth0" in text
        found = re.search(rf"\[{label}\] apart (\S+) after 18 steps", text)
        assert found and float(found[1]) < 1e-12, text
    assert not hosts.agents()


def _processes(job: Job) -> dict[int, int]:
    return {rank: int(job.wait_for(rf"\[rank {rank}[^\]]*\] attempt 0 process (\d+)")[0]) for rank in (0, 1)}


def test_an_agent_killed_there_is_started_again(hosts: Hosts, script: Script) -> None:
    words = ("--max-restarts", "1", "--log-rank", "all", script(test_run_hosts.WAITING))
    job = hosts.start_over(hosts.ssh(), *words)
    ranks = _processes(job)
    (agent,) = hosts.agents()
    os.kill(agent, signal.SIGKILL)
    code, text = job.finish()
    assert code == 0, text
    assert f"host {ADDRESS} is lost" in text and f"host {ADDRESS}: its agent is started again" in text
    assert f"rank 1 (cpu on {ADDRESS}, process {ranks[1]}) was lost with its host" in text
    assert len(re.findall("attempt 1 process", text)) == 2
    assert not alive(ranks[1]) and not hosts.agents()


def test_ctrl_c_ends_all(hosts: Hosts, script: Script) -> None:
    job = hosts.start_over(hosts.ssh(), "--log-rank", "all", script(test_run_hosts.WAITING))
    ranks = _processes(job)
    (agent,) = hosts.agents()
    os.kill(job.process.pid, signal.SIGINT)
    code, text = job.finish()
    assert code == 130, text
    assert end_soon((agent, *ranks.values()))


def test_a_host_whose_key_is_not_known_is_named_with_what_to_do(hosts: Hosts, script: Script) -> None:
    ssh = hosts.ssh(known="nothing")
    code, text = hosts.start_over(ssh, script("raise SystemExit('it ran')")).finish()
    assert code == 7 and "it ran" not in text, text
    assert f"host {ADDRESS}: its agent ended before it came here: Host key verification failed." in text
    assert f"fix: `{ssh} {ADDRESS} true` here asks once" in text


def test_a_key_that_is_refused_is_named_with_what_to_do(hosts: Hosts, script: Script) -> None:
    code, text = hosts.start_over(hosts.ssh("other_key"), script("raise SystemExit('it ran')")).finish()
    assert code == 7 and "it ran" not in text, text
    assert re.search(
        rf"host {ADDRESS}: its agent ended before it came here: \S+: Permission denied \(publickey\)", text
    )
    assert f"fix: ssh has to need no password: `ssh-copy-id {ADDRESS}`" in text
