"""Faults without end: jobs in bitwise mode are disturbed by `evenstep chaos`, each from a seed of its own, until so many faults
were injected or the time is up. Each must end, with the bits of a run that nothing disturbed, and leave nothing behind. One in three
starts again when it loses a rank, one goes on with those that are left, and in one others take the lost ones' places; half of
them train with torch's optimizer, half with es.optim's, whose states the ranks of a host share. Then jobs of three hosts lose their leader (soak_leader.py). Then the opposite: ranks that share far too few cores, of which none may be told
as dead, stopped or hanging.

python scripts/soak.py [--minutes 60] [--faults 1000] [--calm-minutes 60] [--seed 0] [--continue FILE] [--part faults|leader|calm]

With --continue the runs are kept in FILE, a line of JSON each, and a later call goes on where it ends: several sittings make
one result.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import secrets
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))

from heading import print_heading  # noqa: E402

MARK = "EVENSTEP_SOAK_MARK"
TRAINING = ROOT / "scripts" / "soak_training.py"
QUICK_START = ROOT / "tests" / "python" / "quick_start"
PATIENT_SECONDS = (
    "10"  # so long ranks of every other run wait for one that stands still; of the others, as long as by default
)
ONE_HOST = [
    "kill",
    "stop",
    "slow",
    "agent",
    "bit-flip",
    "torn-write",
    "garbage",
    "full-disk",
    "clock",
    "stolen-port",
    "out-of-memory",
    "nan",
    "twin",
]
SEVERAL_HOSTS = ["partition", *ONE_HOST]  # of runs of several hosts
EVERY = 20  # steps from checkpoint to checkpoint
LIMITS = {"kill": 0.2, "stop": 0.3, "partition": 5.0}
RECOVERIES = ("restart", "shrink", "replace")
OPTIMIZERS = ("torch", "es.optim")
KILLS = ("kill", "bit-flip", "torn-write", "stolen-port")  # each of which kills a rank
ALARMS = ("hang", "stall", "rank_ended", "nonfinite", "parameters")  # events that no calm run has

SAID = (" stands still", " is lost: ", " on without ", "this host leads now", "are held")  # by agents, in no calm run


def program() -> str:
    return os.environ.get("EVENSTEP_PROGRAM") or str(pathlib.Path(sys.executable).parent / "evenstep")


def processes(mark: str) -> dict[int, str]:
    """The processes that carry the mark, with their commands."""
    found = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                    )
            except OSError:
                continue
    return found


def left_behind(mark: str) -> str:
    deadline = time.monotonic() + 60
    while processes(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes(mark)
    return f"left behind: {left}" if left else ""


def environment(mark: str) -> dict[str, str]:
    """Ranks start without torch's compiler, as in tests: what is proven are their ends."""
    path = os.pathsep.join(filter(None, [str(QUICK_START), os.environ.get("PYTHONPATH")]))
    own = {MARK: mark, "EVENSTEP_PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    own["EVENSTEP_TEST_WHOLE_END"] = "1"  # as a user's
    return os.environ | own | {"EVENSTEP_COMM_COSTS": "off"}


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


@dataclasses.dataclass
class Run:
    """One run under faults."""

    seed: int
    ranks: int
    hosts: int
    outcome: dict[str, Any]
    wrong: str  # "": as promised
    recovery: str = "restart"
    optimizer: str = "torch"

    @property
    def injected(self) -> list[dict[str, Any]]:
        return [fault for fault in self.outcome.get("faults", []) if fault["injected"]]


class Soak:
    """The part with faults."""

    def __init__(self, base: pathlib.Path, args: argparse.Namespace) -> None:
        self.base, self.args = base, args
        self.against: dict[str, str] = {}  # by optimizer, the run of this sitting that nothing disturbed
        self.runs: list[Run] = []
        self.earlier = 0  # of them, of sittings before
        self.seconds = 0.0  # of this one's, in which faults came

    def choose_length(self) -> None:
        """So many epochs as take the time that was asked for, on this machine as busy as it is, and end with a checkpoint."""
        command = [
            program(),
            "run",
            "-n",
            "2",
            "--runs-dir",
            str(self.base),
            "--name",
            "length",
            "--log-rank",
            "none",
            "--quiet",
        ]
        command += ["--python", sys.executable, str(TRAINING), "6"]
        done = subprocess.run(
            command, env=environment("length"), stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"the training fails without any fault: {done.stderr[-3000:]}")
        with sqlite3.connect(f"file:{self.base / 'length' / 'run.db'}?mode=ro", uri=True) as history:
            seconds, steps = history.execute(
                "SELECT (max(end_ns) - min(end_ns)) * 1e-9, max(step) FROM steps"
            ).fetchone()
        shutil.rmtree(self.base / "length")
        self.args.epochs = max(10, 5 * round(self.args.seconds * steps / seconds / 16 / 5))
        print(
            f"{seconds / steps * 1e3:.1f} ms a step of 2 ranks: {self.args.epochs} epochs of 16 steps each run",
            flush=True,
        )

    def _recovery(self, seed: int) -> str:
        """By turns, of the runs of one host and of those of several."""
        every = self.args.several_hosts
        chosen: list[str] = self.args.recovery.split(",")
        before = seed // every if every else 0
        return chosen[(before if every and seed % every == every - 1 else seed - before) % len(chosen)]

    def _optimizer(self, seed: int) -> str:
        chosen: list[str] = self.args.optimizers.split(",")
        return chosen[seed // 4 % len(chosen)]

    def _command(self, seed: int, name: str) -> tuple[list[str], int, int]:
        every = self.args.several_hosts
        recovery, optimizer = self._recovery(seed), self._optimizer(seed)
        longer = 2 if recovery != "restart" and seed // 3 % 2 else 1  # than others wait for a rank that is stopped
        several = every and seed % every == every - 1
        hosts = 2 + seed // every % 2 if several else 1
        shares = seed % 4 // 2 or optimizer == "es.optim"  # its states, which takes two ranks of a host
        ranks = 2 + seed % 3 if hosts == 1 else 4 if hosts == 2 and shares else hosts
        kinds = ",".join(SEVERAL_HOSTS) if several else self.args.kinds or ",".join(ONE_HOST)
        count = self.args.together if hosts == 1 else self.args.together_hosts
        command = [program(), "chaos", "-n", str(ranks // hosts), "--seed", str(seed), "--faults", str(count)]
        command += ["--kinds", kinds, "--runs-dir", str(self.base), "--name", name, "--policy", "auto", "--json"]
        command += [
            "--checkpoint-every",
            str(EVERY),
            "--hold",
            str(longer * self.args.hold),
            "--python",
            sys.executable,
        ]
        command += ["--recovery", recovery] if recovery != "restart" else []
        command += ["--spares", str(1 + seed % 2)] if recovery == "replace" else []
        command += ["--namespaces", "--hosts", str(hosts)] if several else []
        replaces = hosts == 3 and seed // 8 % 2  # or --restart-agent, or the job of a killed leader is started again
        command += ["--replace-leader"] if replaces else ["--restart-agent"] if seed // 16 % 2 else []
        command += ["--against", self.against[optimizer]] if optimizer in self.against else []
        return [*command, str(TRAINING), str(self.args.epochs), optimizer], ranks, hosts

    def one(self, seed: int) -> Run:
        name, mark = f"run-{seed}", secrets.token_hex(8)
        command, ranks, hosts = self._command(seed, name)
        patient = {"EVENSTEP_STOP_GRACE": PATIENT_SECONDS} if seed // 2 % 2 else {}
        given = environment(mark) | patient
        done = subprocess.run(command, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        wrong = left_behind(mark)
        outcome: dict[str, Any] = json.loads(done.stdout) if done.stdout.startswith("{") else {}
        if done.returncode != 0:
            wrong = f"exit code {done.returncode}: {outcome.get('broken') or done.stderr[-1500:]} {wrong}"
        if wrong:
            kept = pathlib.Path(tempfile.mkdtemp(prefix=f"evenstep-soak-{seed}-"))
            (kept / "chaos.json").write_text(done.stdout + done.stderr)
            for folder in self.base.glob(
                f"{name}-*"
            ):  # but for what filled the disk, and sockets, which cannot be copied
                names = ["chaos-filler", *(at.name for at in folder.rglob("*") if at.is_socket())]
                shutil.copytree(folder, kept / folder.name, ignore=shutil.ignore_patterns(*names))
            wrong += f" (the run is in {kept})"
        optimizer = self._optimizer(seed)
        if optimizer in self.against or wrong:
            shutil.rmtree(self.base / f"{name}-undisturbed", ignore_errors=True)
        else:
            self.against[optimizer] = f"{name}-undisturbed"
        shutil.rmtree(self.base / f"{name}-disturbed", ignore_errors=True)
        return Run(seed, ranks, hosts, outcome, wrong, self._recovery(seed), optimizer)

    def _take_up(self) -> None:
        """The runs of earlier sittings; of a last line that was cut off as it was written nothing is left."""
        path = pathlib.Path(self.args.go_on) if self.args.go_on else None
        if path is not None and path.exists():
            text = path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                print(f"{path}: its last line was cut off, and is left out", flush=True)
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            self.runs = [Run(**json.loads(line)) for line in whole.splitlines()]
            self.earlier = len(self.runs)

    def _keep(self, run: Run) -> None:
        if self.args.go_on:
            with open(self.args.go_on, "a") as file:
                file.write(json.dumps(dataclasses.asdict(run)) + "\n")

    @property
    def injected(self) -> int:
        return sum(len(run.injected) for run in self.runs)

    def run(self) -> None:
        deadline = time.monotonic() + 60 * self.args.minutes
        self._take_up()
        if self.earlier:
            print(f"{self.injected} faults in {self.earlier} runs of before ({self.args.go_on})", flush=True)
        if self.args.epochs == 0 and self.injected < self.args.faults:
            self.choose_length()
        seed = max([self.args.seed, *(run.seed + 1 for run in self.runs)])
        while self.injected < self.args.faults:
            if len(self.runs) > self.earlier and time.monotonic() >= deadline:
                break
            run = self.one(seed)
            self.runs.append(run)
            self._keep(run)
            self.seconds += run.outcome.get("disturbed_seconds", 0.0)
            kinds = ", ".join(fault["kind"] for fault in run.injected)
            differ = run.outcome.get("numbers_that_differ", "?")
            print(
                f"seed {seed:5}: {run.ranks} ranks{f' on {run.hosts} hosts' if run.hosts > 1 else ''}, {run.recovery:7}, {run.optimizer:8}, "
                f"{len(run.injected):2} faults in {run.outcome.get('disturbed_seconds', 0):6.1f} s, {differ} numbers differ "
                f"({kinds})",
                *([f"\n  WRONG: {run.wrong}"] if run.wrong else []),
                flush=True,
            )
            seed += 1

    def report(self) -> None:
        faults = [fault for run in self.runs for fault in run.injected]
        wrong = [run for run in self.runs if run.wrong]
        compared = [run for run in self.runs if run.outcome.get("numbers_that_differ") == 0 and not run.wrong]
        hosts = collections.Counter(run.hosts for run in self.runs)
        several = sum(len(run.injected) for run in self.runs if run.hosts > 1)
        where = ", ".join(
            f"{count} on {number} host{'s' if number > 1 else ''}" for number, count in sorted(hosts.items())
        )
        print(f"\n{len(faults)} faults in {len(self.runs)} runs ({where}; {several} faults on several hosts)")
        print(f"seeds {', '.join(spans([run.seed for run in self.runs]))}")
        if self.seconds > 0:
            now = sum(len(run.injected) for run in self.runs[self.earlier :])
            print(f"{now / self.seconds * 60:.1f} faults a minute of this sitting's disturbed runs")
        modes = collections.Counter(run.recovery for run in self.runs)
        print(f"recovery: {', '.join(f'{mode} {modes[mode]} runs' for mode in RECOVERIES if modes[mode])}")
        optimizers = collections.Counter(run.optimizer for run in self.runs)
        print(f"optimizer: {', '.join(f'{one} {optimizers[one]} runs' for one in OPTIMIZERS if optimizers[one])}")
        for words, outlasted in (
            ("leaders whose place another host took", False),
            ("agents that their ranks outlasted", True),
        ):
            after = [(fault["noticed_ns"] - fault["at_ns"]) * 1e-9 for fault in faults
                     if fault["kind"] == "agent" and fault["noticed_ns"]
                     and ("went on with its ranks" in fault["what"]) == outlasted]  # fmt: skip
            if after:
                print(f"{words}: {len(after)}, after {quantile(after, 0.5):.2f} s ({max(after):.1f} at most)")
        report_agents(faults)
        missing = [kind for kind in (*ONE_HOST, "partition") if all(fault["kind"] != kind for fault in faults)]
        print(f"kinds that did not come: {', '.join(missing) or 'none'}")
        twins = [fault["what"] for fault in faults if fault["kind"] == "twin"]
        refused = [what for what in twins if what.endswith("was refused")]
        print(f"second processes of a rank: {len(twins)}, refused {len(refused)}")
        for what in twins:
            if what not in refused:
                print(f"  {what}")
        print(
            f"runs that ended with the bits of the undisturbed one, at its last step: {len(compared)} of {len(self.runs)}"
        )
        hung = [run for run in wrong if " hangs: " in run.wrong]
        print(f"runs that ended otherwise, hung or left something behind: {len(wrong)}, of which hung: {len(hung)}")
        for run in wrong:
            print(f"  seed {run.seed}: {run.wrong}")
        print("\nseconds until it was noticed (the agent said so, or another rank had ended)")
        numbers = sorted(hosts)
        of_hosts = "".join(f"{f'{number} host' + 's' * (number > 1):>9}" for number in numbers)
        print(f"{'kind':14}{'faults':>7}{of_hosts}{'noticed':>9}{'median':>9}{'p99':>9}{'most':>9}{'aim, p99':>10}")
        for kind in sorted({fault["kind"] for fault in faults}):
            seen = [fault for fault in faults if fault["kind"] == kind]
            took = [(fault["noticed_ns"] - fault["at_ns"]) * 1e-9 for fault in seen if fault["noticed_ns"]]
            line = f"{kind:14}{len(seen):7}"
            for number in numbers:
                line += f"{sum(fault['kind'] == kind for run in self.runs if run.hosts == number for fault in run.injected):9}"
            if kind in LIMITS:
                line += f"{len(took):9}"
                line += f"{quantile(took, 0.5):9.3f}{quantile(took, 0.99):9.3f}{max(took):9.3f}" if took else " " * 27
                line += f"{LIMITS[kind]:10.1f}"
            print(line)
        report_unnoticed(faults)
        report_again(faults)
        report_survivals(self.runs)
        report_late(self.runs)


TENDED = {  # as `evenstep chaos --json` says it
    "outlasted": "survived: outlasted by their ranks",
    "begun_anew": "survived: another one began a new attempt",
    "replaced": "survived: another host leads",
    "host_lost": "survived: the job went on as when its host is lost",
    "resumed_by_chaos": "with the first process: chaos started the job again with --resume auto",
    None: "not known",
}


def report_agents(faults: list[dict[str, Any]]) -> None:
    """Of killed agents, which Evenstep survived by itself; of ranks without memory, which were hurt."""
    killed = collections.Counter(fault.get("agent") for fault in faults if fault["kind"] == "agent")
    for how, words in TENDED.items():
        if killed[how]:
            print(f"agents killed, {words}: {killed[how]}")
    lacks = [fault.get("hurt") for fault in faults if fault["kind"] == "out-of-memory"]
    if lacks:
        print(f"out-of-memory: {len(lacks)}, of which {lacks.count(True)} ended the rank; {lacks.count(False)} hurt nobody "
              f"(it needed none, or did without), {lacks.count(None)} not known")  # fmt: skip


def report_unnoticed(faults: list[dict[str, Any]]) -> None:
    """Of those that have no time, why: noticed and these are all."""
    reasons = collections.Counter(
        (fault["kind"], fault.get("unnoticed") or "not kept by the version that ran")
        for fault in faults
        if fault["kind"] in LIMITS and not fault["noticed_ns"]
    )
    for (kind, reason), count in sorted(reasons.items()):
        print(f"  {kind} without a time: {count} x {reason}")


def report_again(faults: list[dict[str, Any]]) -> None:
    """What a new attempt makes again of what was made before. A run in which it made a step that a whole checkpoint held is wrong
    (chaos says so); here it is counted once more."""
    began = [fault for fault in faults if fault.get("again_from", -1) >= 0]
    told = sum("again_from" in fault for fault in faults)
    if not told:
        return
    print(
        f"\nsteps made again by a new attempt, after {len(began)} of {told} faults (a checkpoint every {EVERY} steps)"
    )
    print(f"{'kind':14}{'times':>7}{'median':>9}{'most':>9}{'over ' + str(EVERY):>9}")
    for kind in sorted({fault["kind"] for fault in began}):
        again = [fault["made_again"] for fault in began if fault["kind"] == kind]
        over = sum(steps > EVERY for steps in again)
        print(f"{kind:14}{len(again):7}{quantile(again, 0.5):9.0f}{max(again):9.0f}{over:9}")
    lost = sum(fault["again_from"] < fault["held"] for fault in began)
    print(f"times that a step was made again which a whole checkpoint held: {lost}")
    print("(more than a checkpoint's distance: the newest was damaged by a fault, was being written, or had no room)")


def report_survivals(runs: list[Run]) -> None:
    """Of the runs in which others go on: whether they kept their processes, and how soon they computed again."""
    known = [
        (run.recovery, fault)
        for run in runs
        if run.recovery != "restart"
        for fault in run.injected
        if fault.get("others") is not None
    ]
    if not known:
        return
    went_on = [(mode, fault) for mode, fault in known if fault["others"] == "went_on"]
    print(f"\nranks that trained beside others were lost, or held them up: {len(known)} times; the others kept their processes: "
          f"{len(went_on)}, and all began again: {len(known) - len(went_on)}")  # fmt: skip
    reasons = collections.Counter(
        fault["why"]
        or ("a rank's own error" if fault["kind"] == "out-of-memory" else "another fault had come just before")
        for _, fault in known
        if fault["others"] != "went_on"
    )
    for reason, count in reasons.most_common():
        print(f"  {count} x {reason}")
    print(f"{'seconds from the fault':44}{'times':>6}{'median':>9}{'p99':>9}{'most':>9}{'aims':>10}")
    rows: list[tuple[str, str, str, tuple[str, ...], str]] = [
        (words, mode, key, kinds, aim if kinds is KILLS else "")
        for mode in ("shrink", "replace")
        for kinds, of in ((KILLS, "kill"), (("stop",), "stop"), (("partition",), "cut"))
        for words, key, aim in (
            (f"{of}, {mode}: the others compute again", "again_ns", "0.5 / 2"),
            (f"{of}, {mode}: their next step", "stepped_ns", ""),
            (f"{of}: another's first step in its place", "joined_ns", "1 / 5"),
        )
        if mode == "replace" or key != "joined_ns"
    ]
    for words, mode, key, kinds, aim in rows:
        took = [
            (fault[key] - fault["at_ns"]) * 1e-9
            for of, fault in went_on
            if of == mode and fault["kind"] in kinds and fault[key]
        ]
        if took:
            print(
                f"{words:44}{len(took):6}{quantile(took, 0.5):9.3f}{quantile(took, 0.99):9.3f}{max(took):9.3f}{aim:>10}"
            )


def report_late(runs: list[Run]) -> None:
    """Each time above its aim, with the faults that came shortly before and after: two at once are not what the aim is of."""
    rows = []
    for run in runs:
        for fault in run.injected:
            times = [("noticed", "noticed_ns", LIMITS.get(fault["kind"]))]
            if fault["kind"] in KILLS and fault.get("others") == "went_on":
                times += [("others compute again", "again_ns", 2.0), ("another's first step", "joined_ns", 5.0)]
            for words, key, aim in times:
                took = (fault[key] - fault["at_ns"]) * 1e-9 if aim and fault.get(key) else 0.0
                if aim and took > aim:
                    rows.append((run, fault, f"{words} after {took:.3f} s (aim {aim})"))
    if rows:
        print("\ntimes above their aims, and the faults within 15 s of these")
    for run, fault, words in rows:
        near = [
            f"{other['kind']}{' of rank ' + str(other['rank']) if other['rank'] >= 0 else ''} "
            f"at {(other['at_ns'] - fault['at_ns']) * 1e-9:+.2f} s"
            for other in run.injected
            if other is not fault and abs(other["at_ns"] - fault["at_ns"]) < 15e9
        ]
        print(f"  seed {run.seed}, {run.recovery}, {run.hosts} hosts, {fault['kind']} ({fault['what']}): {words}; "
              f"{', '.join(near) or 'none other'}")  # fmt: skip


def spans(numbers: list[int]) -> list[str]:
    """ "0 to 4", "7"."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return [str(first) if first == last else f"{first} to {last}" for first, last in found]


def calm(base: pathlib.Path, args: argparse.Namespace) -> str:
    """Eight ranks on two cores; whoever is told as dead, stopped, hanging or lost is told wrongly. What is wrong; "": nothing."""
    if args.calm_hosts == 1:
        return calm_job(base, args, [], [])
    leader, shaped = importlib.import_module("soak_leader"), importlib.import_module("shaped_hosts")
    shell = base / "calm.sh"
    shell.write_text(leader.SHELL)
    shell.chmod(0o755)
    with shaped.ShapedHosts(args.calm_hosts, 1000) as hosts:
        words = ["--hosts", ",".join(hosts.names), "--ssh", str(shell)]
        return calm_job(base, args, ["ip", "netns", "exec", hosts.names[0]], words)


def calm_job(base: pathlib.Path, args: argparse.Namespace, before: list[str], words: list[str]) -> str:
    mark = secrets.token_hex(8)
    cores = sorted(os.sched_getaffinity(0))[:2]
    command = [*before, program(), "run", "-n", str(8 // args.calm_hosts), *words]
    command += ["--runs-dir", str(base), "--name", "calm", "--no-pin", "--log-rank", "none"]
    command += ["--python", sys.executable, str(TRAINING), "1000000"]
    own = {"EVENSTEP_STALL_SECONDS": "30"}
    own |= {"EVENSTEP_HOST_ID": before[-1], "UCX_TLS": "tcp,self"} if before else {}
    began = time.monotonic()
    with (base / "calm.txt").open("wb") as output:
        job = subprocess.Popen(
            command,
            env=environment(mark) | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(timeout=60 * args.calm_minutes)
            seconds, ended = time.monotonic() - began, job.poll()
            with sqlite3.connect(f"file:{base / 'calm' / 'run.db'}?mode=ro", uri=True) as history:
                steps = history.execute("SELECT max(step) + 1 FROM steps").fetchone()[0]
                marks = ", ".join("?" * len(ALARMS))
                told = history.execute(f"SELECT event, rank, words FROM events WHERE event IN ({marks})", ALARMS)
                alarms = [str(each) for each in told.fetchall()]
        except sqlite3.Error as error:  # the job did not get so far
            steps, alarms = 0, [f"no history: {error}"]
        finally:
            job.terminate()
            job.wait(timeout=300)
        stands = [
            line
            for line in (base / "calm.txt").read_text(errors="replace").splitlines()
            if any(alarm in line for alarm in SAID)
        ]
    wrong = [*alarms, *stands, *([f"it ended: {ended}"] if ended is not None else []), left_behind(mark)]
    wrong = [one for one in wrong if one]
    where = f" of {args.calm_hosts} hosts" if before else ""
    print(f"\n8 ranks{where} on {len(cores)} cores, {seconds / 60:.1f} min, {steps} steps: {len(wrong)} false alarms")
    return "\n".join(wrong[:20])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60, help="of the part with faults, at most")
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--calm-minutes", type=float, default=60)
    parser.add_argument(
        "--calm-hosts",
        type=int,
        choices=[1, 2, 4],
        default=1,
        help="of the part without faults (more than one: root), whose heartbeats and leases are in it, too",
    )
    parser.add_argument("--together", type=int, default=32, help="faults of one run of one host")
    parser.add_argument("--together-hosts", type=int, default=9, help="faults of one run of several hosts")
    parser.add_argument("--hold", type=float, default=1, help="seconds that stops, neighbours and lack last")
    parser.add_argument(
        "--several-hosts", type=int, default=6, help="every how many-th run is on two or three hosts (root); 0: none"
    )
    parser.add_argument("--seconds", type=float, default=12, help="that an undisturbed run of two ranks takes to train")
    parser.add_argument("--epochs", type=int, default=0, help="of 16 steps, of each run, in place of seconds")
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the first run; the others' follow (with --continue: those of before, at the least)",
    )
    parser.add_argument("--kinds", help="of runs of one host (default: all)")
    parser.add_argument(
        "--recovery",
        default=",".join(RECOVERIES),
        help="of the runs, one after the other (default: restart,shrink,replace)",
    )
    parser.add_argument(
        "--optimizers", default=",".join(OPTIMIZERS), help="of the runs, by turns (default: torch,es.optim)"
    )
    parser.add_argument("--continue", dest="go_on", metavar="FILE", help="that keeps the runs of several sittings")
    parser.add_argument("--part", choices=["faults", "leader", "calm"], help="only this one")
    parser.add_argument("--leaders", type=int, default=12, help="jobs of three hosts that lose their leader (root)")
    parser.add_argument("--runs-dir", help="a file system of its own, where full-disk is to be among the faults")
    args = parser.parse_args()
    if os.geteuid() != 0:
        args.several_hosts = 0
    print_heading("make soak")
    wrong = ""
    with tempfile.TemporaryDirectory(prefix="evenstep-soak-", dir=args.runs_dir) as text:
        if args.part in (None, "faults"):
            soak = Soak(pathlib.Path(text), args)
            soak.run()
            soak.report()
            wrong = "".join(run.wrong for run in soak.runs)
        if args.part in (None, "leader") and os.geteuid() == 0:
            wrong += importlib.import_module("soak_leader").run(pathlib.Path(text), args)
        if args.part in (None, "calm"):
            wrong += (told := calm(pathlib.Path(text), args))
            print(told)
    print(f"load at the end {os.getloadavg()[0]:.1f}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
