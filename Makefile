# Thin over scripts/: each target is one script that says what it does. `make help` lists them.
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help demo test test-more test-formats test-versions bench bench-balance bench-balancer bench-comm bench-hosts bench-faults bench-compression bench-recovery bench-drain bench-optim bench-checkpoint wheel gpu-check lint format fuzz fuzz-long soak large clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

demo: ## installs what is missing, builds, trains on unequal devices, reports
	@scripts/demo.sh

test: ## the same for all checks: both compilers, sanitizers, pytest on the built wheel, lint
	@scripts/bootstrap.sh test
	@scripts/test.sh

test-more: ## the further variants of long tests that `make test` leaves out (ARGS="-k hosts")
	@scripts/bootstrap.sh more
	@scripts/test_more.sh $(ARGS)

test-formats: ## checkpoints of TensorFlow, transformers, Lightning, DeepSpeed by these themselves, installed into build/formats (3 GB)
	@scripts/bootstrap.sh test
	@scripts/test_formats.sh $(ARGS)

test-versions: ## the Python tests with another torch than the pinned one, or another Python (ARGS="torch==2.14.1", or "--python python3.13 torch==2.14.1")
	@scripts/bootstrap.sh test
	@scripts/versions.sh $(ARGS)

bench: ## measures the numbers of docs/results, side by side with PyTorch
	@scripts/bootstrap.sh test
	@scripts/bench.sh

bench-balance: ## all numbers of balancing and exactness beside what is to be reached: unequal ranks, PyTorch, one device, bits (about an hour)
	@scripts/bootstrap.sh test
	@scripts/bench.sh balance

bench-balancer: ## what balancing reaches of the best split in the simulator, and what it costs
	@scripts/bootstrap.sh test
	@scripts/bench.sh balancer

bench-comm: ## all numbers of communication on one host beside what is to be reached: Gloo, MPI, memory, busy neighbours, DDP (a quarter of an hour)
	@scripts/bootstrap.sh test
	@scripts/bench.sh comm

bench-faults: ## kills and stops ranks inside calls, 1,000 times each: when do the others know?
	@scripts/bootstrap.sh test
	@scripts/bench.sh faults

bench-hosts: ## collectives between hosts made of network namespaces: over links of different speeds; over Gloo host by host, and flat (root)
	@scripts/bootstrap.sh test
	@scripts/build.sh gcc > /dev/null
	@build/gcc/tests/comm/test_comm_namespaces bench
	@scripts/install.sh
	@.venv/bin/python bench/hosts_gloo_bench.py
	@.venv/bin/python bench/hosts_gloo_bench.py --mbit 1000 --sizes 65536,4194304,16777216 --calls all_reduce,all_gather,reduce_scatter

bench-checkpoint: ## saving and loading beside torch.save, DCP and a plain copy; what checkpoints cost training
	@scripts/bootstrap.sh test
	@scripts/bench.sh checkpoint

bench-compression: ## what int8, onebit, topk, … save between hosts, over shaped links, and what they lose (root)
	@scripts/bootstrap.sh test
	@scripts/bench.sh compression

bench-drain: ## how long training pauses while a host is drained and its ranks move, with and without a warm start
	@scripts/bootstrap.sh test
	@scripts/bench.sh drain

bench-optim: ## a step of es.optim beside torch.optim, on two ranks
	@scripts/bootstrap.sh test
	@scripts/bench.sh optim

bench-recovery: ## kills ranks of jobs that go on without them: when do the others compute again?
	@scripts/bootstrap.sh test
	@scripts/bench.sh recovery

wheel: ## a wheel that needs nothing but Python and torch, into dist/
	@scripts/bootstrap.sh test
	@scripts/wheel.sh

gpu-check: ## a folder, dist/gpu-check, that checks all of it on a machine with a GPU and no network
	@scripts/bootstrap.sh test
	@scripts/gpu_check.sh

lint: ## format, ruff, mypy, shellcheck, clang-tidy, room order
	@scripts/bootstrap.sh test
	@scripts/lint.sh

format: ## puts clang-format and ruff right
	@scripts/bootstrap.sh test
	@scripts/format.sh

fuzz: ## ten seconds for each fuzz target
	@scripts/bootstrap.sh test
	@scripts/fuzz.sh 10

fuzz-long: ## ten minutes for each fuzz target
	@scripts/bootstrap.sh test
	@scripts/fuzz.sh 600

soak: ## 1,000 faults of all kinds within an hour, then an hour of 8 ranks on 2 cores without a false alarm (ARGS="--minutes 5 --calm-minutes 5")
	@scripts/bootstrap.sh test
	@scripts/soak.sh $(ARGS)

large: ## collectives, gradients, optimizer states and checkpoints of more than 4 GiB, checked byte by byte (9 to 17 GB of memory a part; ARGS="torch ucx": parts)
	@scripts/bootstrap.sh test
	@scripts/large.sh $(ARGS)

clean: ## removes what was built; keeps .venv and runs
	rm -rf build dist python/evenstep/_core.abi3.so
