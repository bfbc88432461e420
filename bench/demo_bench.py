"""How long a user waits: `make demo` a second time (to reach: 90 s), and the first page after a run starts (5 s).

python bench/demo_bench.py [--rounds 3] [--pages-only]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

from heading import print_heading

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.environ.get("EVENSTEP_PROGRAM") or shutil.which("evenstep") or "evenstep"


def started(pid: int) -> float:
    """When a process was started, in seconds of CLOCK_BOOTTIME (proc_pid_stat(5), field 22)."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")


def fetch(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=30) as answer:
        return answer.read()


def page_with_a_rank(address: str) -> tuple[float, float]:
    """Waits for the whole page and, as the page itself does, for figures with a rank that lives; when that was (CLOCK_BOOTTIME),
    and when that rank was started."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if b"</html>" in fetch(address):
            summary = json.loads(fetch(address.replace("/?", "/api/v1/summary?")))
            pids = [rank["pid"] for rank in summary["ranks"] if rank["alive"]]
            if pids:
                return time.clock_gettime(time.CLOCK_BOOTTIME), min(started(pid) for pid in pids)
        time.sleep(0.01)
    raise SystemExit(f"no page with a rank at {address} within 60 s")


def first_page(folder: str) -> tuple[float, float]:
    """Seconds to the first page that shows a rank: from the start of `evenstep run`, and from that of the first rank."""
    command = [PROGRAM, "run", "-n", "2", "--runs-dir", folder, "--python", sys.executable]
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    job = subprocess.Popen(
        [*command, str(ROOT / "examples" / "char_gpt.py"), "--steps", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert job.stderr is not None
    took = (float("nan"), float("nan"))
    for line in job.stderr:
        found = re.search(r"http://\S+", line)
        if found:
            shown, rank_began = page_with_a_rank(found.group(0))
            took = shown - began, shown - rank_began
            break
    job.stderr.read()
    if job.wait() != 0:
        raise SystemExit(f"the run ended with {job.returncode}")
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pages-only", action="store_true", help="leave the demo out")
    args = parser.parse_args()
    rounds, pages_only = args.rounds, args.pages_only
    print_heading("How long a user waits")
    with tempfile.TemporaryDirectory() as folder:
        pages = [first_page(folder) for _ in range(rounds)]
    from_command, from_ranks = (statistics.median(seconds) for seconds in zip(*pages))
    print(f"  first page with a rank, after the ranks start: {from_ranks:.2f} s (median of {rounds})   to reach: 5 s")
    print(f"  the same, after `evenstep run` starts: {from_command:.2f} s", flush=True)
    if pages_only:
        return
    began = time.monotonic()
    subprocess.run(["make", "demo"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"  make demo, a second time: {time.monotonic() - began:.0f} s   to reach: 90 s")


if __name__ == "__main__":
    main()
