"""What each compression saves between hosts: bench/compression_bench.py on hosts made of network namespaces, over links of
one speed. Needs root, ip and tc, and UCX (else Gloo connects the hosts, and it says so).

    python bench/compression_hosts.py [--hosts 2,4] [--ranks 1] [--mbit 500] [--million 4] [--rounds 8] [--modes]

With several ranks a host, encodings are sent by host, and, for comparison, by rank (engine ucx). With --modes local SGD,
DiLoCo and late gradients are measured in place of encodings (bench/modes_bench.py).
"""

from __future__ import annotations

import argparse
import pathlib
import sys

from heading import print_heading
from shaped_hosts import ShapedHosts, missing

BENCH = pathlib.Path(__file__).with_name("compression_bench.py")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", default="2,4", help="numbers of hosts, one after the other")
    parser.add_argument("--ranks", type=int, default=1, help="of each host")
    parser.add_argument("--mbit", type=float, default=500, help="of each link, in either direction")
    parser.add_argument("--million", type=float, default=4, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="of the small training; 0: none")
    parser.add_argument("--only", default="", help="as of compression_bench.py")
    parser.add_argument("--seconds", type=float, default=1200, help="the most that one number of hosts may take")
    parser.add_argument("--modes", action="store_true", help="the asynchronous modes, not the encodings")
    args = parser.parse_args()
    why = missing()
    if why:
        sys.stderr.write(f"compression between hosts was not measured: {why}\n")
        return 1
    what = "Asynchronous modes" if args.modes else "Compression of gradients"
    print_heading(f"{what} between hosts (network namespaces on one machine, shaped links)")
    sys.stdout.flush()
    if args.modes:
        return measure_modes(args)
    command = [sys.executable, str(BENCH), "--million", str(args.million), "--rounds", str(args.rounds)]
    command += ["--engines", "shared", "--mbit", str(args.mbit), "--steps", str(args.steps)]
    command += ["--only", args.only] if args.only else []
    for number in map(int, args.hosts.split(",")):
        for way in ("auto", "gather") if number > 2 else ("auto",):
            for engine in ("hosts", "ucx") if args.ranks > 1 else ("",):
                failed = measure(args, command, number, way, engine)
                if failed:
                    return failed
    return 0


def measure_modes(args: argparse.Namespace) -> int:
    command = [sys.executable, str(BENCH.with_name("modes_bench.py")), "--million", str(args.million)]
    command += ["--turns", str(args.rounds), "--steps", str(args.steps)]
    command += ["--only", args.only] if args.only else []
    for number in map(int, args.hosts.split(",")):
        print(f"\n== {number} hosts, links of {args.mbit:g} Mbit/s", flush=True)
        with ShapedHosts(number, args.mbit, args.ranks) as hosts:
            failed = hosts.run(command, {}, args.seconds)
        if failed:
            return failed
    return 0


def measure(args: argparse.Namespace, command: list[str], number: int, way: str, engine: str) -> int:
    who = {"": "", "hosts": f", one a host of {args.ranks} ranks", "ucx": f", one a rank, {args.ranks} on each host"}
    print(
        f"\n== {number} hosts, links of {args.mbit:g} Mbit/s, encodings go by the way {way!r}{who[engine]}", flush=True
    )
    partly = (way == "gather" or engine == "ucx") and not args.only
    only = ["--only", "int8,onebit,topk:0.01"] if partly else []
    link = {"hosts": ["--senders", str(number)], "ucx": ["--sharing", str(args.ranks)]}.get(engine, [])
    environment = {"EVENSTEP_COMPRESSION_WAY": way, **({"EVENSTEP_COMM_ENGINE": engine} if engine else {})}
    with ShapedHosts(number, args.mbit, args.ranks) as hosts:
        return hosts.run([*command, *only, *link], environment, args.seconds)


if __name__ == "__main__":
    sys.exit(main())
