"""What `evenstep bench balance` measured as a table, as CSV, and beside its aims."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

KINDS = ("rows", "courses", "changes", "noise")
FIELDS = (
    "part",
    "case",
    "course",
    "ranks",
    "policy",
    "samples_per_second",
    "bound_samples_per_second",
    "of_bound",
    "utilisation",
    "imbalance",
    "steps_after_slowing",
    "steps_after_recovery",
    "lost",
    "of_splits",
)
TITLES = {"simplecnn": "SimpleCNN", "resnet50": "ResNet-50", "bert": "BERT", "gpt2": "GPT-2"}
NAMES = {"ddp": "DDP, equal", "hand": "DDP, by hand", "fixed": "best fixed"}


def part_rows(report: dict[str, Any], kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for part in ("real", "simulated"):
        for row in (report[part] or {}).get(kind, ()):
            yield part, row


def rates_of(report: dict[str, Any], case: str, policy: str) -> Sequence[Sequence[float]]:
    """The real rates of the turns of each round."""
    for part, row in part_rows(report, "rows"):
        if part == "real" and (row["case"], row["policy"]) == (case, policy):
            return list(row["rates"])
    return []


def ratios(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> list[float]:
    """Of the rates of turns of the same round: of those next to one another where both have as many, else of our mean to each."""
    found: list[float] = []
    for mine, peers in zip(ours, theirs):
        mine = mine if len(mine) == len(peers) else [statistics.fmean(mine)] * len(peers)
        found += [a / b for a, b in zip(mine, peers)]
    return found


def _of_bound(report: dict[str, Any], case: str, policy: str) -> float:
    found = (row for part, row in part_rows(report, "rows") if part == "real")
    return float(next(row["of_bound"] for row in found if (row["case"], row["policy"]) == (case, policy)))


def median_steps(values: Sequence[int | None]) -> float:
    """Of runs that never came back infinite."""
    return statistics.median(float("inf") if one is None else one for one in values)


def interval(values: Sequence[float]) -> list[float]:
    """Between which their median is, by their order alone: with 95 % confidence; of five and fewer the least and the most, with
    less (confidence)."""
    ordered, (aside, _) = sorted(values), _ends(len(values))
    return [ordered[aside], ordered[len(values) - 1 - aside]]


def confidence(count: int) -> float:
    """With which the interval of so many values has their median."""
    return 1 - _ends(count)[1]


def _ends(count: int) -> tuple[int, float]:
    """Values that an interval leaves out on either side, and how often the median is beyond it."""
    aside, beyond = 0, 1  # how many of 2^count outcomes put the median beyond the next value of a side
    while 2 * (beyond + math.comb(count, aside + 1)) <= 0.05 * 2**count:
        beyond += math.comb(count, aside + 1)
        aside += 1
    return aside, beyond / 2 ** (count - 1)


def quartiles(values: Sequence[float]) -> list[float]:
    """Between which half of them are."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _aim(what: str, how: str, figure: float, bound: float, unit: str = "", least: bool = True) -> dict[str, Any]:
    reached = figure >= bound if least else figure <= bound
    aim = f"{'≥' if least else '≤'} {bound:g}{unit}"
    return {"what": what, "part": how, "figure": figure, "unit": unit, "aim": aim, "reached": reached}


def _policy(report: dict[str, Any]) -> str:
    """Whose figures count; of reports that do not say it the default's where it was measured, else the last's that was."""
    if report.get("judged"):
        return str(report["judged"])
    ran = [row["policy"] for kind in KINDS for _, row in part_rows(report, kind)]
    ours = [policy for policy in ran if policy not in ("ddp", "hand", "single", "fixed")]
    return "auto" if "auto" in ours else ours[-1] if ours else ""


def told_interval(bounds: Sequence[float], count: int, digits: int = 3) -> str:
    """Of so many values; with what confidence where that is not 95 %. Nothing of one value."""
    sure = confidence(count)
    words = f"{bounds[0]:.{digits}f} to {bounds[1]:.{digits}f}"
    return "" if count < 2 else words if sure >= 0.95 else f"{words}, {100 * sure:.0f} %"


def _within(bounds: Sequence[float] | None, values: Sequence[float]) -> str:
    told = told_interval(bounds, len(values)) if bounds else ""
    return f" ({told})" if told else ""


def aims(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that are to be reached, as far as they were measured; a short look measures none."""
    found: list[dict[str, Any]] = []
    if report["quick"]:
        return found
    policy = _policy(report)
    for case in ("1:1", "2:1", "4:1", "16:1", "4:4:1"):
        for part, row in part_rows(report, "rows"):
            if part == "real" and (row["case"], row["policy"]) == (case, policy):
                words = f"{case}: of the best integer split{_within(row.get('of_bound_interval'), row.get('of_bound_turns', ()))}"
                found.append(_aim(words, part, row["of_bound"], 0.95))
        for peer, bound, only in (("ddp", 2.8, ("4:1", "4:4:1")), ("hand", 1.0, ())):
            found_ratios = ratios(rates_of(report, case, policy), rates_of(report, case, peer))
            if found_ratios and (case in only or not only):
                ratio = statistics.median(found_ratios)
                words = f"{case}: beside {NAMES[peer]}{_within(interval(found_ratios), found_ratios)}"
                words += f" (the best split itself: {1 / _of_bound(report, case, peer):.2f})" if only else ""
                found.append(_aim(words, "real", ratio, bound))
    for part, row in part_rows(report, "changes"):
        if row["policy"] == policy:
            for key, words in (("steps_after_slowing", "slowed"), ("steps_after_recovery", "recovered")):
                what = f"{row['case']}: {words}, at 0.9 of the optimum"
                found.append(_aim(what, part, median_steps(row[key]), 5, " steps", least=False))
    for part, row in part_rows(report, "noise"):
        if row["policy"] == policy:
            what = f"{row['case']}: lost against the best fixed split"
            found.append(_aim(what, part, 100 * row["lost"], 1, " %", least=False))
    if report["real"] is not None:
        found.append(_overhead(report["real"]))
    return found


def _overhead(real: dict[str, Any]) -> dict[str, Any]:
    cost = sum(real["overhead"].values())
    what = "balancing by itself, of a step (deciding, memory, and the vote)"
    if "telling_seconds" in real["overhead"]:  # not in reports of before
        what = "balancing by itself, of a step (deciding, memory, ballots, and the vote)"
    aim = _aim(what, "real", 1e6 * cost, 50, " µs", least=False)
    fastest = max((row["samples_per_second"] for row in real["rows"] if row["policy"] != "single"), default=0.0)
    if not fastest:  # no steady steps: it is not known which part of one this is
        return aim
    part = cost * fastest / real["batch"]  # of the shortest step
    aim["aim"] = "≤ 50 µs or 0.2 %"
    aim["reached"] = aim["reached"] or part <= 0.002
    aim["what"] += f": {100 * part:.3f} % of the shortest step"
    return aim


def table(report: dict[str, Any]) -> str:
    lines = ["evenstep bench balance" + (" --quick: no figures to keep" if report["quick"] else "")]
    lines += [f"  {name:9} {report[name]}" for name in ("date", "hardware", "software") if name in report]
    if report["real"] is not None:
        lines += ["", *_real_heading(report["real"])]
        lines += _rows(report["real"]["rows"]) if report["real"]["rows"] else ()
        lines += _changing(report["real"])
    if report["simulated"] is not None:
        simulated = report["simulated"]
        lines += [
            "",
            f"SIMULATED: invented ranks, the real balancer, {simulated['seeds']} seeds of {simulated['steps']} steps; the bound is the",
            "best split of each step at the true speeds, with the same noise",
            *_rows(simulated["rows"]),
        ]
    if report["left"]:
        lines += ["", "NOT MEASURED: " + "; ".join(report["left"])]
    lines += ["", f"aims: medians, of policy {_policy(report)}"]
    for aim in report["aims"]:
        figure = f"{aim['figure']:.3g}{aim['unit']}" if math.isfinite(aim["figure"]) else "never"
        verdict = "reached" if aim["reached"] else "NOT reached"
        lines.append(f"  {aim['part']:9} {aim['what']:82} {figure:>10}  {aim['aim']:>16}  {verdict}")
    if not report["aims"]:
        lines.append("  none of them was measured")
    return "\n".join(lines)


def _real_heading(real: dict[str, Any]) -> Iterator[str]:
    way = "CPU quotas" if real["slowed_by"] == "quota" else "busy neighbours"
    shared = f"on {real['cores']} cores together, none with more than {real.get('core_part', 1):.2f} of a core"
    place = "pinned" if real["ranks"] <= real["cores"] else shared
    yield (
        f"REAL: {real['ranks']} ranks, {place}, made unequal by {way}; global batch {real['batch']}, "
        f"{real['rounds']} rounds in turn; {title_of(real['model'])}"
    )
    yield "the bound is the best integer split at the speeds that the ranks have while all of them run, measured right before and right"
    yield "after each turn (DDP's utilisation is by these); behind a figure between which its median is,"
    yield "with 95 % confidence, or what is said"


def title_of(model: dict[str, Any]) -> str:
    """The model and its data in words."""
    words = f"{TITLES[model['name']]} of {model['parameters']:,} parameters"
    if model["scaled_down"]:
        sizes = ", ".join(f"{name}={value}" for name, value in model["sizes"].items())
        words += f" (scaled down: {sizes}; published: {model['published_parameters']:,})"
    words += f", {model['data']}"
    if model["batch_norm"] == "sync":
        words += "; its BatchNorm is synchronised by Evenstep, each rank's own under DDP (torch has no other on CPUs)"
    elif model["batch_norm"] is not None:
        words += "; BatchNorm by each rank's own statistics"
    return words


CHANGING = {
    "courses": (
        "REAL, and the last rank's speed does not stay: the bound is the best split of each step, at the speeds measured for its quota;",
        "splits: the same by the shares that ran alone, whatever else a step took",
    ),
    "changes": (
        "REAL, and the last rank slows down and recovers: the bound is the best split before, while and after; back: steps until 0.9",
        "of it, after it slowed and after it recovered, of each run",
    ),
    "noise": (
        "REAL, and noise alone: the bound is the best fixed split, found by trying those around it, and run in turns under the same",
        "noise; lost: against it, and between which the median is, with 95 % confidence, or what is said",
    ),
}


def _changing(real: dict[str, Any]) -> Iterator[str]:
    """Ranks whose speeds do not stay."""
    for kind, heading in CHANGING.items():
        if real[kind]:
            yield from ("", *heading, *_rows(real[kind]))


def _rows(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    case = ""
    yield f"  {'policy':14}{'samples/s':>10}{'of bound':>10}{'imbalance':>11}  utilisation of each rank"
    for row in rows:
        if row["case"] != case:
            case = row["case"]
            yield f"  {case} (bound {row['bound_samples_per_second']:.1f} samples/s{_spread(row)})"
        used = " ".join(f"{100 * one:3.0f}%" for one in row["utilisation"])
        imbalance = "-" if row["policy"] == "single" else f"{100 * row['imbalance']:.0f}%"
        name = NAMES.get(row["policy"], row["policy"])
        yield f"    {name:12}{row['samples_per_second']:10.1f}{row['of_bound']:10.3f}{imbalance:>11}  {used}{_aside(row)}"


def _spread(row: dict[str, Any]) -> str:
    if "bound_quartiles" not in row:
        return ""
    low, high = row["bound_quartiles"]
    return f"; half of its {row['bound_moments']} moments from {low:.1f} to {high:.1f}"


def _aside(row: dict[str, Any]) -> str:
    if "of_bound_interval" in row:
        return f" {told_interval(row['of_bound_interval'], len(row['of_bound_turns']))}"
    if "of_splits" in row:
        return f"  splits {row['of_splits']:.3f}"
    if "lost_interval" in row and row["policy"] != "fixed":
        told = told_interval([100 * one for one in row["lost_interval"]], len(row["rates"]), 1)
        return f"  lost {100 * row['lost']:.1f} %" + (f" ({told})" if told else "")
    if "steps_after_slowing" in row:
        return f"  back {_cell(row['steps_after_slowing'])}; {_cell(row['steps_after_recovery'])}"
    return ""


def csv_text(report: dict[str, Any]) -> str:
    """A line for each figure's case and policy; what a line lacks is empty, lists are apart by spaces."""
    out = io.StringIO()
    writer = csv.DictWriter(out, FIELDS, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    for kind in KINDS:
        for part, row in part_rows(report, kind):
            whole = {**_steady(report, part, row), **row}
            writer.writerow({"part": part, **{name: _cell(value) for name, value in whole.items()}})
    return out.getvalue()


def _steady(report: dict[str, Any], part: str, row: dict[str, Any]) -> dict[str, Any]:
    """What the simulator tells of a case's throughput, ranks and loads beside its changes and its noise."""
    if "utilisation" in row:
        return {}
    same = (one for one in report[part]["rows"] if (one["case"], one["policy"]) == (row["case"], row["policy"]))
    return dict(next(same, {}))


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join("never" if one is None else _cell(one) for one in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
