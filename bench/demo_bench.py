"""How long a user waits: `make demo` a second time (to reach: 90 s), and the first page after a run starts (5 s).

python bench/demo_bench.py [--rounds 3]
"""

from __future__ import annotations

import argparse
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


def first_page(folder: str) -> float:
    """Seconds from the start of `evenstep run` to the whole page in the reader's hands."""
    command = [PROGRAM, "run", "-n", "2", "--runs-dir", folder, "--python", sys.executable]
    began = time.monotonic()
    job = subprocess.Popen(
        [*command, str(ROOT / "examples" / "char_gpt.py"), "--steps", "2"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert job.stderr is not None
    took = float("nan")
    for line in job.stderr:
        found = re.search(r"http://\S+", line)
        if found:
            with urllib.request.urlopen(found.group(0), timeout=30) as page:
                if b"</html>" in page.read():
                    took = time.monotonic() - began
            break
    job.stderr.read()
    job.wait()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print_heading("How long a user waits")
    with tempfile.TemporaryDirectory() as folder:
        pages = [first_page(folder) for _ in range(rounds)]
    print(f"  first page: {statistics.median(pages):.2f} s (median of {rounds})   to reach: 5 s", flush=True)
    began = time.monotonic()
    subprocess.run(["make", "demo"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(f"  make demo, a second time: {time.monotonic() - began:.0f} s   to reach: 90 s")


if __name__ == "__main__":
    main()
