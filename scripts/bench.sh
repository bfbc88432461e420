#!/usr/bin/env bash
# `make bench`: all figures of docs/results, each beside its peer in one run. About thirty minutes; leave the machine alone meanwhile.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/install.sh
bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
export PATH="$bin:$PATH"
results=docs/results
day="$(date -u +%Y-%m-%d)"
mkdir -p "$results"
which="${1:-all}"

wanted() { [ "$which" = all ] || [ "$which" = "$1" ]; }

if wanted comm; then
  echo "== all-reduce between two ranks"
  cmake -B build/bench -G Ninja -DEVENSTEP_BENCH=ON -DEVENSTEP_PYTHON=OFF -DEVENSTEP_PROGRAM=OFF > /dev/null
  cmake --build build/bench --target comm_latency > /dev/null
  "$bin/python" bench/comm_bench.py --json "$results/comm-$day.json" | tee "$results/comm-$day.txt"
fi
if wanted ddp; then
  echo "== DDP on the backend and on Gloo"
  "$bin/python" bench/ddp_bench.py --json "$results/ddp-$day.json" | tee "$results/ddp-$day.txt"
fi
if wanted faults; then
  echo "== a rank is killed or stopped inside a call"
  scripts/build.sh gcc > /dev/null
  build/gcc/bench/comm_faults 1000 | tee "$results/comm-faults-$day.txt"
fi
if wanted exactness; then
  echo "== parameters after 50 steps, balanced against one process"
  "$bin/python" bench/exactness.py | tee "$results/exactness-$day.txt"
fi
if wanted telemetry; then
  echo "== what telemetry costs"
  "$bin/evenstep" run -n 2 --name telemetry-bench bench/telemetry_overhead.py -o "$results/telemetry-$day.txt"
fi
if wanted train; then
  echo "== training on unequal and on equal ranks"
  "$bin/python" bench/train_bench.py --json "$results/train-$day.json" --markdown "$results/train-$day.md"
fi
if wanted demo; then
  echo "== the demo, a second time, and the first page"
  "$bin/python" bench/demo_bench.py | tee "$results/demo-$day.txt"
fi
