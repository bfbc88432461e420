"""The part of soak.py in which leaders are lost: jobs of three hosts (network namespaces) with the default, that another host takes
a lost leader's place. In each the leader's agent is killed, or all of its host, or its agent stops, or its cable is cut for a
while; before and after that a rank of another host is killed or stopped. Each job must end, with the bits of one rank that nothing
disturbed, and leave nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import random
import secrets
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import soak
from shaped_hosts import ShapedHosts, missing

LOSSES = ("its agent killed", "its host killed", "its cable cut", "its agent stopped")
CUT_SECONDS, STOP_SECONDS = 9.0, 14.0  # longer than another host waits until it leads
PATIENCE_SECONDS = 400.0
SLOW_SECONDS = 25.0  # of a first step under another leader: what the job said is kept, to see why
LEADS = "this host leads now"
STANDS = "another one takes its place (3 of 3 vote)"
# As ssh: its end, and that of who called it, is no matter for what it started on another machine.
SHELL = """#!/bin/sh
name=$1
shift
exec 3<&0
EVENSTEP_HOST_ID=$name setsid ip netns exec "$name" "$@" <&3 3<&- &
wait $!
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is done to one job: parts of its steps at which a rank of another host, the leader, and a rank again are lost."""

    recovery: str
    optimizer: str
    loss: str
    ranks: int  # of each host
    at: tuple[float, float, float]
    stops: tuple[bool, bool]  # whether the rank is stopped, not killed


def plan(seed: int, recoveries: list[str], optimizers: list[str]) -> Plan:
    """The recoveries take turns, and with each of them the losses; es.optim has two ranks of a host, which share its states."""
    chance = random.Random(seed)
    at = (chance.uniform(0.15, 0.3), chance.uniform(0.4, 0.55), chance.uniform(0.65, 0.8))
    recovery, loss = recoveries[seed % len(recoveries)], LOSSES[seed // len(recoveries) % len(LOSSES)]
    optimizer = optimizers[seed // 2 % len(optimizers)]
    ranks = 2 if optimizer == "es.optim" else 1 + seed % 2
    return Plan(recovery, optimizer, loss, ranks, at, (chance.random() < 0.3, chance.random() < 0.3))


@dataclasses.dataclass
class Outcome:
    seed: int
    plan: Plan
    faults: int
    leads: float  # seconds from the loss until another host leads, and until its first step; nan: never
    steps: float
    wrong: str  # "": as promised
    begins: float = float("nan")  # what its processes took to their first step, where it starts the ranks anew,
    began: float = float("nan")  # and what they took at the job's own start, when nothing was lost


class Wrong(Exception):
    """The job did not do what it should."""


def until(true: Callable[[], bool], what: str, deadline: float) -> None:
    while not true():
        if time.monotonic() > deadline:
            raise Wrong(f"{what}: not within {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.02)


class Job:
    def __init__(self, base: pathlib.Path, hosts: ShapedHosts, seed: int, own: Plan, epochs: int) -> None:
        self.base, self.hosts, self.plan = base, hosts, own
        self.name, self.mark = f"leader-{seed}", secrets.token_hex(8)
        self.deadline = time.monotonic() + PATIENCE_SECONDS
        self.environment = soak.environment(self.mark) | {"EVENSTEP_HOST_ID": hosts.names[0], "UCX_TLS": "tcp,self"}
        self.total = 16 * epochs
        shell = base / "shell.sh"
        shell.write_text(SHELL)
        shell.chmod(0o755)
        command = ["ip", "netns", "exec", hosts.names[0], soak.program(), "run", "--hosts", ",".join(hosts.names)]
        command += ["-n", str(own.ranks), "--ssh", str(shell), "--no-pin", "--log-rank", "none", "--name", self.name]
        command += ["--runs-dir", str(base), "--checkpoint-every", "20", "--max-restarts", "9", "--policy", "auto"]
        command += ["--recovery", own.recovery] if own.recovery != "restart" else []
        command += ["--python", sys.executable, str(soak.TRAINING), str(epochs), own.optimizer]
        with (base / f"{self.name}.txt").open("wb") as output:
            self.process = subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def said(self) -> str:
        """By who leads now; before another one does, by the one that was started."""
        files = (self.base / self.name / "logs/leader.log", self.base / f"{self.name}.txt")
        texts = [file.read_text(errors="replace") for file in files if file.exists()]
        return texts[0] if LEADS in texts[0] else texts[-1]

    def newest(self) -> tuple[int, int, pathlib.Path | None]:
        """When the newest history begins, its last step, its file."""
        found: tuple[int, int, pathlib.Path | None] = (0, -1, None)
        for path in self.base.glob(f"{self.name}*/run.db"):
            with contextlib.suppress(sqlite3.Error, TypeError):
                with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as history:
                    began = int(history.execute("SELECT value FROM meta WHERE key = 'started_ns'").fetchone()[0])
                    last = history.execute("SELECT max(step) FROM steps").fetchone()[0]
                found = max(found, (began, -1 if last is None else int(last), path), key=lambda one: one[0])
        return found

    def comes_to(self, part: float) -> bool:
        """Whether so much of its steps is made before it ends: those that are left may be quick."""
        until(lambda: self.ended() or self.newest()[1] >= part * self.total, f"{part:.2f} of the steps", self.deadline)
        return not self.ended()

    def ranks(self) -> list[int]:
        """Of the other hosts."""
        others, found = {f"EVENSTEP_HOST_ID={name}".encode() for name in self.hosts.names[1:]}, []
        for pid in soak.processes(self.mark):
            with contextlib.suppress(OSError, IndexError):
                words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                parent = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                led = pathlib.Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")[0].endswith(b"/evenstep")
                program = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
                if led and not program.endswith(b"/evenstep") and others.intersection(words):
                    found += [pid] if any(word.startswith(b"RANK=") for word in words) else []
        return sorted(found)

    def disturb_rank(self, chance: random.Random, stops: bool) -> None:
        there: list[int] = []
        until(
            lambda: bool(there.extend(self.ranks()) or there) or self.ended(), "a rank of another host", self.deadline
        )
        if not there:
            return
        victim = chance.choice(there)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGSTOP if stops else signal.SIGKILL)
            if stops:  # shorter and longer than others wait for it
                time.sleep(chance.uniform(0.1, 2.5))
                os.kill(victim, signal.SIGCONT)

    def leads(self) -> bool:
        return LEADS in self.said()

    def lose_leader(self) -> tuple[int, float]:
        """When that was, and the seconds until another one leads."""
        first, began_ns = self.hosts.names[0], time.monotonic_ns()
        cut = ["ip", "-n", first, "link", "set", "eth0"]
        if self.plan.loss == "its agent killed":
            self.process.kill()
        elif self.plan.loss == "its host killed":
            listed = subprocess.run(["ip", "netns", "pids", first], capture_output=True, text=True, check=True)
            for pid in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        elif self.plan.loss == "its cable cut":
            subprocess.run([*cut, "down"], check=True)
        else:
            self.process.send_signal(signal.SIGSTOP)
        try:
            until(self.leads, "another host leads", self.deadline)
            led_ns = time.monotonic_ns()
            held = {"its cable cut": CUT_SECONDS, "its agent stopped": STOP_SECONDS}.get(self.plan.loss, 0.0)
            time.sleep(max(0.0, held - (led_ns - began_ns) * 1e-9))
        finally:
            if self.plan.loss == "its cable cut":
                subprocess.run([*cut, "up"], check=True)
            elif self.plan.loss == "its agent stopped":
                self.process.send_signal(signal.SIGCONT)
        return began_ns, (led_ns - began_ns) * 1e-9

    def ended(self) -> bool:
        return f"{self.name} ended well" in self.said() or f"{self.name} failed" in self.said()

    def first_step(self, lost_ns: int, leads: float) -> float:
        """Seconds from the loss to the end of the first step under who leads; what was under way may have ended before."""
        began, _, path = self.newest()
        if path is None or began < lost_ns:
            raise Wrong("who led last has no history")
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as history:
            query = "SELECT min(end_ns) FROM steps WHERE end_ns > ?"
            (first,) = history.execute(query, (lost_ns + int(leads * 1e9),)).fetchone()
        return float("nan") if first is None else (int(first) - lost_ns) * 1e-9

    def start_seconds(self, since_ns: int) -> float:
        """From the start of the first processes after that to the first step that follows; nan: none was started."""
        starts: list[int] = []
        ends: list[int] = []
        for path in self.base.glob(f"{self.name}*/run*.db"):
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as history:
                query = "SELECT at_ns FROM events WHERE event = 'rank_started' AND at_ns > ?"
                starts += [int(at) for (at,) in history.execute(query, (since_ns,))]
                ends += [int(at) for (at,) in history.execute("SELECT end_ns FROM steps WHERE end_ns > ?", (since_ns,))]
        first = min(starts, default=0)
        followed = [at for at in ends if at > first]
        return (min(followed) - first) * 1e-9 if first and followed else float("nan")

    def compare(self, alone: pathlib.Path) -> None:
        newest = [max(folder.glob("step-*"), default=None) for folder in (alone, self.base / self.name / "checkpoints")]
        if None in newest or newest[0].name != newest[1].name:  # type: ignore[union-attr]
            raise Wrong(f"it ended at {newest[1]}, and what nothing disturbed at {newest[0]}")
        for file in ("model.safetensors", "optimizer.safetensors"):  # the others' ranks have random states of their own
            words = [soak.program(), "ckpt", "diff", *(str(folder / file) for folder in newest if folder is not None)]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise Wrong(f"other bits than without faults: {done.stdout[-500:]}{done.stderr[-500:]}")

    def run(self, seed: int, alone: pathlib.Path) -> Outcome:
        chance, outcome = random.Random(-seed), Outcome(seed, self.plan, 0, float("nan"), float("nan"), "")
        lost_ns = 0
        try:
            until(lambda: STANDS in self.said() or self.process.poll() is not None, "three hosts vote", self.deadline)
            for part, stops in zip(self.plan.at, (self.plan.stops[0], None, self.plan.stops[1])):
                if not self.comes_to(part):
                    continue
                if stops is None:
                    lost_ns, outcome.leads = self.lose_leader()
                else:
                    self.disturb_rank(chance, stops)
                outcome.faults += 1
            if lost_ns == 0:
                raise Wrong("it ended before its leader was lost")
            until(self.ended, "the end", self.deadline)
            if f"{self.name} ended well" not in self.said():
                raise Wrong("it failed")
            outcome.steps = self.first_step(lost_ns, outcome.leads)
            outcome.began = self.start_seconds(0)
            if self.plan.recovery == "restart":  # else the ranks that are left have begun before
                outcome.begins = self.start_seconds(lost_ns)
            self.compare(alone)
        except Wrong as error:
            outcome.wrong = f"{error}: {self.said()[-1500:]} {outcome.wrong}"
            self.end_all()
        finally:
            if sys.exc_info()[0] is not None:  # interrupted
                self.end_all()
        self.process.wait()
        outcome.wrong += soak.left_behind(self.mark)
        return outcome

    def keep(self, seed: int) -> pathlib.Path:
        """What it has said and noted, in a folder that stays."""
        kept = pathlib.Path(tempfile.mkdtemp(prefix=f"evenstep-soak-leader-{seed}-"))
        shutil.copy(self.base / f"{self.name}.txt", kept)
        for folder in self.base.glob(f"{self.name}*/"):
            shutil.copytree(folder, kept / folder.name, ignore=shutil.ignore_patterns("checkpoints"))
        return kept

    def end_all(self) -> None:
        for pid in soak.processes(self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def undisturbed(base: pathlib.Path, epochs: int, optimizer: str) -> pathlib.Path:
    """The checkpoints of one rank that nothing disturbed."""
    name = f"alone-{optimizer}"
    command = [soak.program(), "run", "-n", "1", "--no-monitor", "--quiet", "--runs-dir", str(base), "--name", name]
    command += ["--checkpoint-every", "20", "--python", sys.executable, str(soak.TRAINING), str(epochs), optimizer]
    done = subprocess.run(
        command, env=soak.environment("alone"), stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise SystemExit(f"the training fails without any fault: {done.stderr[-3000:]}")
    return base / name / "checkpoints"


def report(outcomes: list[Outcome]) -> None:
    wrong = [one for one in outcomes if one.wrong]
    faults = sum(one.faults for one in outcomes)
    print(
        f"\nleaders lost: {len(outcomes)} jobs of three hosts, {faults} faults ({len(outcomes)} of them the leader's)"
    )
    print(
        f"jobs that ended with the bits of one rank that nothing disturbed: {len(outcomes) - len(wrong)} of {len(outcomes)}"
    )
    print(f"{'seconds from the loss':44}{'jobs':>6}{'median':>9}{'most':>9}")
    parts = (("another host leads", "leads"), ("its first step", "steps"), ("of which its processes' start", "begins"))
    for words, of in (*parts, ("their start at the job's own beginning", "began")):
        for recovery in soak.RECOVERIES:
            took = [getattr(one, of) for one in outcomes if one.plan.recovery == recovery and not one.wrong]
            took = [one for one in took if one == one]  # of a job that ended before it
            if took:
                print(f"{f'{recovery}: {words}':44}{len(took):6}{soak.quantile(took, 0.5):9.2f}{max(took):9.2f}")
    for one in wrong:
        print(f"  seed {one.seed}: {one.wrong}")


def run(base: pathlib.Path, args: argparse.Namespace) -> str:
    """What is wrong; "": nothing."""
    if why := missing():
        print(f"\nleaders are not lost: {why}")
        return ""
    epochs = args.epochs or 40
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its namespaces and jobs end with it
    deadline, outcomes = time.monotonic() + 60 * args.minutes, []
    optimizers: list[str] = args.optimizers.split(",")
    alone = {one: undisturbed(base, epochs, one) for one in optimizers}
    with ShapedHosts(3, 10000) as hosts:
        for seed in range(args.seed, args.seed + args.leaders):
            if outcomes and time.monotonic() >= deadline:
                break
            own = plan(seed, args.recovery.split(","), optimizers)
            job = Job(base, hosts, seed, own, epochs)
            outcome = job.run(seed, alone[own.optimizer])
            outcomes.append(outcome)
            print(
                f"seed {seed:5}: {3 * own.ranks} ranks on 3 hosts, {own.recovery:7}, {own.optimizer:8}, the leader lost "
                f"({own.loss}), {outcome.faults} faults; another leads after {outcome.leads:.1f} s, its first step after {outcome.steps:.1f} s",
                f"({outcome.begins:.1f} of them the start of its processes; {outcome.began:.1f} at the job's own beginning)"
                if own.recovery == "restart"
                else "",
                *([f"\n  WRONG: {outcome.wrong}"] if outcome.wrong else []),
                *([f"\n  kept in {job.keep(seed)}"] if outcome.wrong or outcome.steps > SLOW_SECONDS else []),
                flush=True,
            )
    report(outcomes)
    return "".join(one.wrong for one in outcomes)
