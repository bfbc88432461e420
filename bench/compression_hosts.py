"""What each compression saves between hosts: bench/compression_bench.py on hosts made of network namespaces, one rank a
host, over links of one speed. Needs root, ip and tc, and UCX (else Gloo connects the hosts, and it says so).

    python bench/compression_hosts.py [--hosts 2,4] [--mbit 500] [--million 4] [--rounds 8]
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
    parser.add_argument("--mbit", type=float, default=500, help="of each link, in either direction")
    parser.add_argument("--million", type=float, default=4, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300, help="of the small training; 0: none")
    parser.add_argument("--only", default="", help="as of compression_bench.py")
    parser.add_argument("--seconds", type=float, default=1200, help="the most that one number of hosts may take")
    args = parser.parse_args()
    why = missing()
    if why:
        sys.stderr.write(f"compression between hosts was not measured: {why}\n")
        return 1
    print_heading("Compression of gradients between hosts (network namespaces on one machine, shaped links)")
    sys.stdout.flush()
    command = [sys.executable, str(BENCH), "--million", str(args.million), "--rounds", str(args.rounds)]
    command += ["--engines", "shared", "--mbit", str(args.mbit), "--steps", str(args.steps)]
    command += ["--only", args.only] if args.only else []
    for number in map(int, args.hosts.split(",")):
        for way in ("auto", "gather") if number > 2 else ("auto",):
            print(f"\n== {number} hosts, links of {args.mbit:g} Mbit/s, encodings go by the way {way!r}", flush=True)
            only = ["--only", "int8,onebit,topk:0.01"] if way == "gather" and not args.only else []
            with ShapedHosts(number, args.mbit) as hosts:
                failed = hosts.run([*command, *only], {"EVENSTEP_COMPRESSION_WAY": way}, args.seconds)
            if failed:
                return failed
    return 0


if __name__ == "__main__":
    sys.exit(main())
