#!/usr/bin/env bash
# `make bench`: all figures of docs/results, each beside its peer in one run; leave the machine alone meanwhile. BENCH_QUICK=1: a short look at
# `balance`, whether all of it works, into build/results. BENCH_ROUNDS=N: other than 4 rounds of it. BENCH_MPI="PYTHON PYTHON": interpreters
# with mpi4py and an MPI each, which `comm` takes the fastest of; else the one beside this one, if any.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ "${1:-all}" = balancer ] || scripts/install.sh # its programs need no Python
bin="${EVENSTEP_VENV:-$PWD/.venv}/bin"
export PATH="$bin:$PATH"
results=docs/results
[ -z "${BENCH_QUICK:-}" ] || results=build/results
day="$(date -u +%Y-%m-%d)"
mkdir -p "$results" build
which="${1:-all}"

wanted() { [ "$which" = all ] || [ "$which" = "$1" ]; }

if wanted comm; then
  echo "== all-reduce between two ranks, then four on two cores, then beside busy neighbours"
  cmake -B build/bench -G Ninja -DEVENSTEP_BENCH=ON -DEVENSTEP_PYTHON=OFF -DEVENSTEP_PROGRAM=OFF > /dev/null
  cmake --build build/bench --target comm_latency comm_memory > /dev/null
  mpis=()
  for one in ${BENCH_MPI:-}; do mpis+=(--mpi-python "$one"); done
  "$bin/python" bench/comm_bench.py "${mpis[@]}" --json "$results/comm-$day.json" | tee "$results/comm-$day.txt"
  "$bin/evenstep" bench comm -n 4 --sizes 64M --collectives all_reduce -o build/comm-four.json | tee -a "$results/comm-$day.txt"
  "$bin/python" bench/comm_busy.py --json build/comm-busy.json | tee "$results/comm-busy-$day.txt"
  build/bench/bench/comm_memory | tee "$results/comm-memory-$day.txt"
fi
if wanted ddp || [ "$which" = comm ]; then
  echo "== DDP on the backend and on Gloo"
  "$bin/python" bench/ddp_bench.py --json "$results/ddp-$day.json" | tee "$results/ddp-$day.txt"
  "$bin/python" bench/ddp_bench.py --spare --bucket-mb 0.25 --json build/ddp-spare.json | tee -a "$results/ddp-$day.txt"
  "$bin/python" bench/torch_engine_bench.py | tee "$results/torch-engine-$day.txt"
fi
if wanted faults; then
  echo "== a rank is killed or stopped inside a call"
  scripts/build.sh gcc > /dev/null
  build/gcc/bench/comm_faults 1000 | tee "$results/comm-faults-$day.txt"
  if [ "$(id -u)" = 0 ]; then
    "$bin/python" bench/stop_hosts.py | tee "$results/comm-faults-hosts-$day.txt"
  fi
fi
if wanted comm; then
  echo "== all numbers of communication, beside what is to be reached"
  # Kills and stops have a command of their own (`faults`): the newest that is kept, by its name's day
  faults="$({ grep -l '^engine signal' "$results"/comm-faults-20*.txt docs/results/comm-faults-20*.txt 2> /dev/null || true; } | sort -t/ -k3 | tail -n 1)"
  "$bin/python" bench/comm_numbers.py --two "$results/comm-$day.json" --four build/comm-four.json --busy build/comm-busy.json \
    --ddp "$results/ddp-$day.json" --spare build/ddp-spare.json ${faults:+--faults "$faults"} | tee "$results/comm-numbers-$day.txt"
fi
rounds="${BENCH_ROUNDS:-4}"
if [ "$which" = balance ] && [ -z "${BENCH_QUICK:-}" ]; then
  # Of the two cores that the kept figures are from; the bench itself says of each of its parts, on this machine, how long it takes.
  cat << EOF
== about $((33 + 5 * rounds)) minutes until all numbers are there (two ranks $((11 + 5 * rounds)), three $((2 + rounds / 2)), the simulator 1, models 5, bitwise mode 12),
   then 14 more (speeds that do not stay 7, four and five ranks 7)
EOF
fi
part() { # TITLE
  printf '== %s, %s UTC\n' "$1" "$(date -u +%H:%M)"
}
if wanted balance; then
  part "what each policy reaches on unequal ranks, real and simulated"
  "$bin/evenstep" bench balance ${BENCH_QUICK:+--quick} --rounds "$rounds" --courses steady,slowing,noise --csv "$results/balance-$day.csv" -o "$results/balance-$day.json" --plots build/plots \
    | tee "$results/balance-$day.txt"
  part "three ranks"
  "$bin/evenstep" bench balance ${BENCH_QUICK:+--quick} --rounds "$rounds" -n 3 --only real --speeds 4:4:1 --policies equal,auto \
    --courses steady \
    -o "$results/balance-three-$day.json" | tee "$results/balance-three-$day.txt"
fi
if wanted balancer || [ "$which" = balance ]; then
  echo "== what balancing reaches of the best split in the simulator, and what it costs"
  cmake -B build/bench -G Ninja -DEVENSTEP_BENCH=ON -DEVENSTEP_PYTHON=OFF -DEVENSTEP_PROGRAM=OFF > /dev/null
  cmake --build build/bench --target balancer_plan balancer_regret balancer_alike balancer_bench > /dev/null
  {
    date -u "+%Y-%m-%d %H:%M UTC, $(nproc) cores, load $(cut -d' ' -f1 /proc/loadavg); make bench-balancer"
    for part in balancer_plan balancer_regret balancer_alike balancer_bench; do
      printf '\n== build/bench/bench/%s\n' "$part"
      "build/bench/bench/$part"
    done
  } | tee "$results/balancer-$day.txt"
fi
if wanted recovery; then
  echo "== ranks are killed and the others go on"
  "$bin/python" bench/recovery_bench.py | tee "$results/recovery-$day.txt"
  if [ "$(id -u)" = 0 ]; then
    "$bin/python" bench/recovery_hosts.py | tee "$results/recovery-lost-hosts-$day.txt"
  fi
fi
if wanted drain; then
  echo "== a host is drained and its ranks move"
  "$bin/python" bench/drain_bench.py | tee "$results/drain-$day.txt"
fi
if wanted exactness; then
  echo "== parameters after 50 steps, balanced against one process"
  "$bin/python" bench/exactness.py | tee "$results/exactness-$day.txt"
fi
if wanted exactness || wanted balance; then
  echo "== parameters after 200 steps of a CNN, a GPT and a BERT against one device"
  "$bin/python" bench/exact_models.py --json build/exact-models.json ${BENCH_QUICK:+--steps 5} | tee "$results/exact-models-$day.txt"
fi
if wanted bitwise || wanted balance; then
  echo "== what exact=bitwise costs, and random histories"
  # `bitwise` by itself has 20 histories of each case, of which each starts two to four jobs; beside the numbers of balancing 5, and
  # so 20 of the four cases, no two the same
  short=()
  if [ "$which" = balance ]; then short=(--rounds 10 --histories 5); fi
  if [ -n "${BENCH_QUICK:-}" ]; then short=(--rounds 1 --models gpt --histories 1 --cases gpt); fi
  "$bin/python" bench/bitwise.py -o "$results/bitwise-$day.txt" --json build/bitwise.json "${short[@]}"
fi
if wanted balance; then
  echo "== all numbers of balancing and exactness, beside what is to be reached"
  "$bin/python" bench/balance_numbers.py --balance "$results/balance-$day.json" "$results/balance-three-$day.json" --models build/exact-models.json --bitwise build/bitwise.json \
    | tee "$results/balance-numbers-$day.txt"
  # What follows no number is made of: whoever has no time for it may end it here.
  part "speeds that do not stay"
  "$bin/evenstep" bench balance ${BENCH_QUICK:+--quick} --only real --courses drifting,bursty -o "$results/balance-courses-$day.json" \
    | tee "$results/balance-courses-$day.txt"
  part "a mix of four cards, and five ranks"
  for speeds in 12.7:9.1:3:3 16:8:4:2:1; do
    "$bin/evenstep" bench balance ${BENCH_QUICK:+--quick} --rounds "$(((rounds + 1) / 2))" -n "$(tr ':' '\n' <<< "$speeds" | wc -l)" --only real \
      --speeds "$speeds" --policies equal,auto --courses steady
  done | tee "$results/balance-more-ranks-$day.txt"
fi
if wanted telemetry; then
  echo "== what telemetry costs"
  "$bin/evenstep" run -n 2 --name telemetry-bench bench/telemetry_overhead.py -o "$results/telemetry-$day.txt"
fi
if wanted norms; then
  echo "== what synchronised BatchNorm costs"
  "$bin/evenstep" run -n 2 --name batch-norm-bench bench/batch_norm.py -o "$results/batch-norm-$day.txt"
fi
if wanted optim; then
  echo "== a step of es.optim beside torch.optim"
  "$bin/evenstep" run -n 2 --name optim-bench bench/optim_bench.py -o "$results/optim-$day.txt"
fi
if wanted loading; then
  echo "== loading by workers and from a cache"
  "$bin/evenstep" run -n 2 --name loading-bench bench/loading_bench.py -o "$results/loading-$day.txt"
fi
if wanted checkpoint; then
  echo "== checkpoints beside torch.save, DCP and a plain copy"
  "$bin/python" bench/checkpoint_bench.py --json "$results/checkpoint-$day.json" | tee "$results/checkpoint-$day.txt"
fi
if wanted compression && { [ "$which" != all ] || [ "$(id -u)" = 0 ]; }; then
  echo "== what compression saves between hosts, over shaped links"
  "$bin/python" bench/compression_hosts.py | tee "$results/compression-$day.txt"
fi
if wanted train; then
  echo "== training on unequal and on equal ranks"
  "$bin/python" bench/train_bench.py --json "$results/train-$day.json" --markdown "$results/train-$day.md"
fi
if wanted demo; then
  echo "== the demo, a second time, and the first page"
  "$bin/python" bench/demo_bench.py | tee "$results/demo-$day.txt"
fi
