"""All numbers that balancing and exactness are to reach, each with its aim and whether it was reached: one table of what the other
benches have measured (`make bench-balance` runs them, and keeps it in docs/results).

    evenstep bench balance -o balance.json
    evenstep bench balance -n 3 --only real --speeds 4:4:1 --policies equal,auto --courses steady -o three.json
    python bench/exact_models.py --json models.json
    python bench/bitwise.py --json bitwise.json
    python bench/balance_numbers.py --balance balance.json three.json --models models.json --bitwise bitwise.json
"""

from __future__ import annotations

import argparse
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reached import Number, missing, print_top, read, table

# what `evenstep bench balance` is to tell of real ranks: how its lines begin and end
REAL = (
    *(f"{speeds}: of the best integer split" for speeds in ("1:1", "2:1", "4:1", "16:1", "4:4:1")),
    *(f"{speeds}: beside DDP, equal" for speeds in ("4:1", "4:4:1")),
    *(f"{speeds}: beside DDP, by hand" for speeds in ("1:1", "2:1", "4:1", "16:1", "4:4:1")),
    "slowed, at 0.9 of the optimum",
    "recovered, at 0.9 of the optimum",
    "lost against the best fixed split",
    "balancing by itself, of a step",
)
COST = 0.30  # of a step's time, by exact="bitwise"


def of_balance(*reports: Mapping[str, Any]) -> Iterator[Number]:
    """The aims that `evenstep bench balance` knows itself, of real ranks first, then of simulated ones."""
    known = [one for report in reports for one in report["aims"]]
    for words in REAL:
        whole = re.compile(rf"(?<![\d:]){re.escape(words)}")  # 4:1, and not the end of 4:4:1
        found = [one for one in known if one["part"] == "real" and whole.search(one["what"])]
        yield from map(_of_aim, found) if found else [missing(words)]
    for one in known:
        if one["part"] == "simulated":
            yield _of_aim(one)


def _of_aim(aim: Mapping[str, Any]) -> Number:
    never = aim["figure"] is None or not math.isfinite(aim["figure"])  # JSON knows no infinity
    figure = "never" if never else f"{aim['figure']:.3g}{aim['unit']}"
    simulated = " (simulated)" if aim["part"] == "simulated" else ""
    return Number(aim["what"] + simulated, figure, aim["aim"], bool(aim["reached"]))


def of_models(figures: Sequence[Mapping[str, Any]] | None) -> Iterator[Number]:
    if not figures:
        yield missing("final parameters against one device")
        return
    for one in figures:
        apart = len(one["without_gradient"])
        beside = f"one device and itself {one['itself']:.1e}" + (f"; {apart} without gradient apart" if apart else "")
        what = f"{one['model']}, {one['dtype']}: parameters after {one['steps']} steps against one device"
        reached = one["difference"] <= one["bound"]
        yield Number(what, f"{one['difference']:.1e}", f"≤ {one['bound']:.0e}", reached, beside)


def of_bitwise(results: Mapping[str, Any] | None) -> Iterator[Number]:
    if results is None or not results["histories"]:
        yield missing("exact='bitwise': random histories")
    if results is None:
        return
    for case, one in results["histories"].items():
        what = f"exact='bitwise', {case}: of {one['of']} random histories of {one['steps']} steps those with other bits"
        yield Number(what, str(one["of"] - one["same"]), "0", one["same"] == one["of"])
    for model, one in results["cost"].items():
        what = f"exact='bitwise', {model}: more time a step, blocks of {one['block']}"
        yield Number(what, f"{100 * one['over_plain']:.1f} %", f"≤ {100 * COST:.0f} %", one["over_plain"] <= COST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--balance", type=pathlib.Path, nargs="*", default=[], metavar="FILE")
    for name in ("models", "bitwise"):
        parser.add_argument(f"--{name}", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()

    balance = [report for file in options.balance if (report := read(file)) is not None]
    print_top("Balanced and exact: what is to be reached, and what was")
    if any(report["quick"] for report in balance):
        print("  a short look (--quick): its figures of balancing are none\n")
    numbers = [*of_balance(*balance), *of_models(read(options.models)), *of_bitwise(read(options.bitwise))]
    print("\n".join(table(numbers)))


if __name__ == "__main__":
    main()
