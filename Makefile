# Everything runs in .venv, which is made on first use and brought up to date when what it depends on changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
BENCH_INSTALLED := $(VENV)/installed-bench
DOCS_INSTALLED := $(VENV)/installed-docs
FLOORS := .venv-floors
FLOORS_INSTALLED := $(FLOORS)/installed
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# Three tests beside each other, also on two processors: a test waits a fifth of its time for what it has started.
# `make test BESIDE=` runs one after the other. Each process starts with a third in the order of the files, so what a
# file's tests share is mostly made once, and takes from the others' when it has done its own: whole files, shared out by
# their number of tests, leave those of few long tests to the end.
BESIDE := -n 3 --dist worksteal
# Else each process compiles anew what it imports: a feeder starts 0.2 s later, and pytest 8 s.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help install demo check docs test test-fast test-all test-floors bench clean

help:
	@echo "make demo    train on handwritten digits, kill the training, resume it, and compare (about a minute)"
	@echo "make test    the tests (some minutes)"
	@echo "make test-fast  only the tests of the lower rooms, which start no loader (a minute)"
	@echo "make test-all  the same with the tests marked exhaustive: more of what the others show (much longer)"
	@echo "make test-floors  the tests with the oldest versions that pyproject.toml allows, in another environment"
	@echo "make check   ruff and mypy"
	@echo "make docs    the documentation as a site, in ./site"
	@echo "make bench   compare the speed with other loaders (BENCH=--quick for a first look)"
	@echo "make install only make .venv"
	@echo "make clean   remove .venv and everything else that was made here"

install: $(INSTALLED)

# pip is the last thing that `venv` makes, so an interrupted run is repaired by the next.
$(BIN)/pip:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "streamload needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/pip
	@echo "installing streamload and what it needs into $(VENV): some minutes, once"
	$(PIP_INSTALL) -e ".[dev,demo]"
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@echo "installing the loaders to compare with"
	$(PIP_INSTALL) -e ".[bench]"
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(PIP_INSTALL) -e ".[docs]"
	@touch $@

demo: $(INSTALLED)
	$(BIN)/python examples/digits/run_demo.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

test: $(INSTALLED)
	$(BIN)/python -m pytest $(BESIDE)

test-fast: $(INSTALLED)
	$(BIN)/python -m pytest $(BESIDE) tests/test_structure.py $(addprefix tests/,memory tar order images index fetch decode write)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(BESIDE) -m ""

# The floors are what pyproject.toml says behind `>=`. torch is the pinned one: its floor is offered with CUDA only, in
# gigabytes. setuptools is of the build, for which pip makes an environment of its own.
$(FLOORS_INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FLOORS)
	grep -oE '[A-Za-z0-9_.-]+(\[[a-z]+\])?>=[0-9.]+' pyproject.toml | sed -E 's/\[.*\]//; s/>=/==/' \
		| grep -vE '^(torch|setuptools)=' >$(FLOORS)/floors.txt
	grep '^torch==' constraints.txt >>$(FLOORS)/floors.txt
	$(FLOORS)/bin/python -m pip install --quiet -c $(FLOORS)/floors.txt -e ".[dev,demo,gcs,hf]"
	@touch $@

test-floors: $(FLOORS_INSTALLED)
	$(FLOORS)/bin/python -m pytest $(BESIDE)

bench: $(BENCH_INSTALLED)
	$(BIN)/python benchmarks/bench_loader.py --plot docs/benchmark.png $(BENCH)
	$(BIN)/python benchmarks/bench_decode.py
	$(BIN)/python benchmarks/bench_gpu.py
	$(BIN)/python benchmarks/bench_shardify.py
	$(BIN)/python benchmarks/bench_map.py
	$(BIN)/python benchmarks/bench_many.py
	$(BIN)/python benchmarks/bench_remote.py
	$(BIN)/python benchmarks/bench_cache.py
	$(BIN)/python benchmarks/bench_ray.py

clean:
	rm -rf $(VENV) $(FLOORS) .demo .bench build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
