# Everything a developer or CI runs. Needs make, Python 3.11 or newer and a package index; the rest
# is installed into .venv, which every target creates, and refreshes when a requirements file has
# changed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
DEV := $(VENV)/.stamp-dev
DEMO := $(VENV)/.stamp-demo
BENCH := $(VENV)/.stamp-bench
CHAOS := $(VENV)/.stamp-chaos
PIP := $(PY) -m pip --disable-pip-version-check --no-input
KERNELS := store/deltackpt_store/coding/kernels.c
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: help venv demo test floors mutate soak chaos lab lint format bench clean

help:
	@echo "The first of these that runs installs what it needs into $(VENV): some minutes, the network,"
	@echo "about 2.5 GB of disk. The commands are in $(VENV)/bin then (deltackpt, pytest, ...)."
	@echo
	@echo "make demo    train a real model, kill it during a save, resume bit for bit"
	@echo "make test    the test suite (ARGS='tests/unit -k cli' selects)"
	@echo "make floors  tests with the oldest dependencies that are allowed, in .floors"
	@echo "make lint    style, types, layers, wheel content"
	@echo "make bench   stall, bytes and restore time against other checkpointers"
	@echo "make mutate  remove each guard of the store's promises and see that a test notices"
	@echo "make lab     kernel crashes, disk replay, NFS, full and failing disks (root, Debian packages)"
	@echo "make soak    random operations, power cuts and kills (ARGS='--minutes 60 --seed 7')"
	@echo "make chaos   an outside judge kills a training at its file events"
	@echo "make format  rewrite the sources in the project's style"
	@echo "make venv    only the development environment, in $(VENV)"
	@echo "make help    this list"
	@echo "make clean   remove build output, caches and the environment"

# torch is named exactly and first: asked for by range it may come with several GB of CUDA.
$(DEV): pyproject.toml requirements-dev.txt constraints-dev.txt hatch_build.py $(KERNELS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("deltackpt needs Python 3.11 or newer; this is %s: make PYTHON=python3.11 ..." % sys.version.split()[0])'
	@echo "Installing into $(VENV): about 2.5 GB, some minutes, pip says nothing until it is done."
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --constraint constraints-dev.txt --upgrade pip
	$(PIP) install --quiet --constraint constraints-dev.txt torch==2.13.0
	$(PIP) install --quiet --constraint constraints-dev.txt --requirement requirements-dev.txt
	$(PIP) install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

$(DEMO) $(BENCH) $(CHAOS): $(VENV)/.stamp-%: requirements-%.txt $(DEV)
	$(PIP) install --quiet --constraint constraints-dev.txt --requirement $<
	@touch $@

venv: $(DEV)

demo: $(DEMO)
	$(PY) tools/demo.py $(ARGS)

# One OpenMP thread per test process: two processes of N threads each only wait for one another.
# What fails beside others (real processes, two cores) must pass when it is run again by itself.
# Equal string hashes, so that both collect the same names of parametrized tests.
test: $(DEV)
	@sh .ci/browser.sh
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(PY) -m pytest -n 2 --dist loadfile $(ARGS) \
	  || OMP_NUM_THREADS=1 PYTHONHASHSEED=0 $(PY) -m pytest --last-failed --last-failed-no-failures none $(ARGS)

# The oldest of all runtime dependencies but torch, in an environment of its own.
floors:
	$(PYTHON) -m venv .floors
	.floors/bin/python -m pip --disable-pip-version-check --no-input install --quiet --upgrade pip
	.floors/bin/python -m pip --disable-pip-version-check --no-input install --quiet torch==2.13.0
	.floors/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
	  $$($(PYTHON) tools/floors.py) \
	  pytest pytest-timeout pytest-xdist hypothesis pyyaml pandas hatchling editables build
	.floors/bin/python -m pip --disable-pip-version-check --no-input install --quiet \
	  --no-build-isolation --no-deps --editable .
	OMP_NUM_THREADS=1 PYTHONHASHSEED=0 .floors/bin/python -m pytest -n 2 --dist loadfile \
	  $(or $(ARGS),tests/unit tests/property --ignore-glob='*_kernels_*' --ignore-glob='*_xxh3_*')

lint: $(DEV)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pyright
	$(VENV)/bin/lint-imports --no-cache
	$(PY) -m mypy tests/docs/consumer.py
	$(PY) tools/check_wheel.py

# Optional: asks for Debian packages and root, says what is missing, takes most of an hour.
lab: $(DEV)
	$(PY) -m lab $(ARGS)

format: $(DEV)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

mutate: $(DEV)
	$(PY) tools/mutate.py $(ARGS)

soak: $(DEV)
	$(PY) tools/soak.py $(ARGS)

chaos: $(CHAOS)
	$(PY) tools/chaos.py $(ARGS)

bench: $(BENCH)
	$(PY) tools/bench.py $(ARGS)

clean:
	rm -rf $(VENV) .floors build dist .bench .demo .mutate .hypothesis .mypy_cache .pytest_cache .ruff_cache
