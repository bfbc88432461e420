"""All numbers that communication is to reach on this machine, each with its aim and whether it was reached: one table of what the
other benches have measured (`make bench-comm` runs them, and keeps it in docs/results).

    python bench/comm_bench.py --json two.json
    evenstep bench comm -n 4 --sizes 64M --collectives all_reduce -o four.json
    python bench/comm_busy.py --json busy.json
    python bench/ddp_bench.py --json ddp.json
    python bench/ddp_bench.py --spare --bucket-mb 0.25 --json spare.json
    python bench/comm_numbers.py --two two.json --four four.json --busy busy.json --ddp ddp.json --spare spare.json --faults faults.txt

`faults.txt` is what `make bench-faults` prints. What needs a GPU is not among them.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from reached import Number, missing, print_top, read, table

LARGE, SMALL = 1 << 26, 1 << 10
US = 1e6
FAULT = re.compile(r"^(\w+) +(SIG\w+) +(\d+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)$", re.MULTILINE)
SOONEST = {"SIGKILL": 200.0, "SIGSTOP": 300.0}  # milliseconds until all others know


def at_least(what: str, figure: float | None, aim: float, unit: str = "", beside: str = "") -> Number:
    if figure is None:
        return missing(what)
    return Number(what, f"{figure:.3g}{unit}", f"≥ {aim:g}{unit}", figure >= aim, beside)


def at_most(what: str, figure: float | None, aim: float, unit: str = "", beside: str = "") -> Number:
    if figure is None:
        return missing(what)
    return Number(what, f"{figure:.3g}{unit}", f"≤ {aim:.3g}{unit}", figure <= aim, beside)


def of_two(report: Mapping[str, Any] | None) -> Iterator[Number]:
    """Two ranks, one core each: 64 MB, then 1 KB by every way there is."""
    large = {row["bytes"]: row for row in report["sizes"]}.get(LARGE, {}) if report else {}
    library = large.get("mpi_library", "MPI")
    yield at_least("64 MB, arena: of the memory-traffic bound", large.get("arena_of_bound"), 0.8)
    yield at_least("64 MB, arena: times Gloo", large.get("arena_times_gloo"), 8)
    yield at_least(f"64 MB, arena: times {library}", large.get("arena_times_mpi"), 5)
    yield at_least("64 MB, plain tensors: times Gloo", large.get("plain_times_gloo"), 6.5)
    small = (report or {}).get("small", {})
    dist, empty, gloo = (small.get(f"dist, {name}") for name in ("evenstep", "empty override", "gloo"))
    known = dist is not None and empty is not None and gloo is not None
    more = US * (dist - empty) if known else None
    yield at_most("1 KB, dist.all_reduce: more than an override that does nothing", more, 5, " µs")
    yield at_least("1 KB, dist.all_reduce: times as fast as Gloo", gloo / dist if known else None, 15)
    for name in ("C", "C, in the arena"):
        yield at_most(f"1 KB, from {name}", US * small[name] if name in small else None, 1.5, " µs")
        of_mpi = ", C" if name == "C" else ", C, in place"
        for mpi, theirs in small.items():
            if name in small and mpi.endswith(of_mpi):
                beside = mpi.removesuffix(of_mpi)
                yield at_most(f"1 KB, from {name}: beside {beside} from C", US * small[name], US * theirs, " µs")
    for name in ("es.comm, NumPy", "es.comm, NumPy in the arena", "es.comm, tensor"):
        yield at_most(f"1 KB, {name}", US * small[name] if name in small else None, 3, " µs")


def of_four(report: Mapping[str, Any] | None) -> Iterator[Number]:
    for row in report["rows"] if report else ():
        if row["collective"] == "all_reduce" and row["bytes"] == LARGE:
            seconds = row["seconds"]
            for way in ("arena", "plain"):
                yield at_least(f"64 MB, four ranks, {way}: times Gloo", seconds["gloo"] / seconds[way], 5)
            return
    yield missing("64 MB, four ranks: times Gloo")


def of_busy(report: Mapping[str, Any] | None) -> Iterator[Number]:
    if not report:
        yield missing("a busy neighbour on each core: of the quiet figure")
        return
    for row in report["sizes"]:
        for way in ("arena", "plain"):
            kept = row["seconds"][f"{way} quiet"] / row["seconds"][f"{way} each"]
            yield at_least(
                f"a busy neighbour on each core, {row['bytes']} bytes, {way}: of the quiet figure", kept, 0.35
            )


def of_ddp(report: Mapping[str, Any] | None, spare: Mapping[str, Any] | None) -> Iterator[Number]:
    """spare: of the run that leaves a core to what communicates."""
    if not report:
        yield missing("DDP: times as fast as on Gloo")
    for row in report["rows"] if report else ():
        yield at_least(f"DDP, {row['bytes'] / 1e6:.1f} MB of gradients: times Gloo", row["gloo"] / row["evenstep"], 1)
    if not spare:
        yield missing("DDP, a core is spare: hidden behind backward")
    for row in spare["rows"] if spare else ():
        words = f"DDP, {row['bytes'] / 1e6:.1f} MB, a core is spare"
        alone = row["evenstep alone"]
        yield at_least(f"{words}: times Gloo", row["gloo"] / row["evenstep"], 1)
        hidden = 100 * max(0.0, 1 - row["evenstep open"] / alone)
        beside = f"{1e3 * row['evenstep open']:.2f} of {1e3 * alone:.2f} ms open; last bucket {row['last']:.0%}"
        yield at_least(f"{words}: hidden", hidden, 90, " %", beside)


def of_faults(text: str) -> Iterator[Number]:
    found = FAULT.findall(text)
    if not found:
        yield missing("a peer is killed or stopped in a call: until all others know")
    for engine, signal, tries, _, median, _, most, wrong in found:
        words = f"engine {engine}, {signal} in a call, {tries} tries: until all others know, at most"
        beside = f"median {median} ms; wrong {wrong}"
        yield at_most(words, float(most) if wrong == "0" else float("inf"), SOONEST[signal], " ms", beside)
    left = re.search(r"left behind.*: (\d+)$", text, re.MULTILINE)
    if left:
        yield at_most("left behind by these: descriptors, mappings, files", float(left[1]), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("two", "four", "busy", "ddp", "spare", "faults"):
        parser.add_argument(f"--{name}", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()

    print_top("Communication: what is to be reached, and what was")
    faults = ""
    if options.faults is not None and options.faults.is_file():
        faults = options.faults.read_text()
        print(f"  kills and stops are of {options.faults.name}\n")
    numbers = [
        *of_two(read(options.two)),
        *of_four(read(options.four)),
        *of_busy(read(options.busy)),
        *of_ddp(read(options.ddp), read(options.spare)),
        *of_faults(faults),
    ]
    print("\n".join(table(numbers)))


if __name__ == "__main__":
    main()
