"""`make demo`: trains a small GPT twice on unequal devices, the equal split and the balanced one, and compares.

Uses the devices there are. Where they are fewer than two or all equal, it makes two unequal CPU ranks, each on its own
core, the second held to a quarter of its core's time by the kernel, and says so. Everything shown was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = (
    os.environ.get("EVENSTEP_PROGRAM")
    or shutil.which("evenstep", path=str(pathlib.Path(sys.executable).parent))
    or "evenstep"
)
SCRIPT = "examples/char_gpt.py"  # all paths are those that a user in the tree would type; they show in the report


def say(text: str) -> None:
    print(
        f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else f"\n{text}", flush=True
    )


def evenstep(*words: str) -> None:
    """Runs one command of the program on this terminal; its failure is the demo's."""
    print(
        "$ evenstep " + " ".join(words),
        flush=True,
    )
    code = subprocess.run(["evenstep", *words], executable=PROGRAM, cwd=ROOT, check=False).returncode
    if code != 0:
        raise SystemExit(code)


def told(*words: str) -> dict:
    """What a command of the program says as JSON."""
    done = subprocess.run([PROGRAM, *words, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0 and not done.stdout:
        sys.stderr.write(done.stderr)
        raise SystemExit(done.returncode)
    return json.loads(done.stdout)


def can_slow_a_rank() -> bool:
    """By a quota, or by a busy neighbour on a CPU that is the rank's alone."""
    if len(os.sched_getaffinity(0)) >= 2:
        return True
    return any(check["name"] == "CPU quota" and check["state"] == "ok" for check in told("doctor")["checks"])


def choose(found: list[dict], can_slow: bool) -> tuple[list[str], str]:
    """Options of `evenstep run` that give unequal ranks, and the words that say what they are."""
    gpus = [device for device in found if device["kind"] == "cuda"]
    if len({device["model"] for device in gpus}) > 1:
        return ["--devices", ",".join(d["name"] for d in gpus)], f"{len(gpus)} GPUs of different models: " + ", ".join(
            f"{d['name']} {d['model']}" for d in gpus
        )
    if gpus:
        return ["--devices", f"{gpus[0]['name']},cpu"], f"one GPU ({gpus[0]['model']}) and the CPU beside it"
    if not can_slow:
        return ["-n", "2"], (
            "one CPU and no permission to set CPU quotas: the two ranks share the CPU and are equal. On two cores one of them\n"
            "would be slowed, and the balanced run be the faster one"
        )
    return ["-n", "2", "--cpu-quota", "1:0.25"], (
        "no unequal devices here, so two unequal CPU ranks are made: each on cores of its own, and rank 1 held\n"
        "to a quarter of its time by a CPU quota of the kernel (where that is not permitted, by a busy process pinned to the same core)"
    )


def measured_in_quiet(profile: pathlib.Path) -> bool:
    """Whether the profile of an earlier run is one to go on with; a device that other work disturbed is measured anew."""
    try:
        found = json.loads(profile.read_text(encoding="utf-8"))["devices"]
        return bool(found) and not any(device.get("disturbed") for device in found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="optimizer steps of each run (default 32)")
    parser.add_argument("--batch", type=int, default=32, help="global batch (default 32)")
    parser.add_argument("--new-profile", action="store_true", help="measure the devices anew")
    args = parser.parse_args()
    began = time.monotonic()

    say("1. What is here")
    options, words = choose(told("devices")["devices"], can_slow_a_rank())
    print(words)
    os.chdir(ROOT)
    profile = pathlib.Path("gpu_profiles.json")
    if args.new_profile or not profile.exists():
        say("2. How fast is each device? (measured once, kept in gpu_profiles.json)")
        evenstep("profile", "--quick", "-o", str(profile))
    elif not measured_in_quiet(profile):
        say(
            "2. How fast is each device? (the gpu_profiles.json of an earlier run was disturbed by other work: measured anew)"
        )
        evenstep("profile", "--quick", "-o", str(profile))
    else:
        say("2. How fast is each device? (gpu_profiles.json of an earlier run is used; --new-profile measures anew)")
    runs = pathlib.Path("runs")
    plan = runs / "demo-plan.json"
    runs.mkdir(exist_ok=True)
    script = [SCRIPT, "--steps", str(args.steps), "--batch", str(args.batch)]
    job = ["--runs-dir", str(runs), "--profile", str(profile), *options]

    say("3. The plan: a few measured steps, then what each rank should do and how long it will take")
    evenstep("plan", *job, "--name", "demo-plan", "-o", str(plan), *script)
    say("4. The equal split, as PyTorch's own data parallelism has it")
    evenstep("run", *job, "--name", "demo-equal", "--policy", "equal", "--checkpoint-every", str(args.steps), *script)
    say("5. The balanced split")
    evenstep("run", *job, "--name", "demo", "--policy", "hybrid", "--checkpoint-every", str(args.steps), *script)
    say("6. The two side by side")
    evenstep("report", str(runs / "demo"), "--compare", str(runs / "demo-equal"), "--plan", str(plan))
    print(f"\nThe page with the plots stays: runs/demo/report.html    ({time.monotonic() - began:.0f} s in all)")


if __name__ == "__main__":
    main()
