# Everything runs inside .venv, which is built here: a machine needs Python 3.11 or newer, this file and a network.

VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# One more than a small machine has cores: some tests wait for servers and TTLs. With four, JVMs take it from each other.
WORKERS ?= 3
PYTEST := $(PYTHON) -m pytest

# Spark's Python workers must be this environment's, its Java one that scripts/java_home.py vouches for, and its network
# address the loopback, whatever the machine calls itself. Another Spark on the machine is not to be picked up.
export PYSPARK_PYTHON := $(CURDIR)/$(PYTHON)
export PYSPARK_DRIVER_PYTHON := $(CURDIR)/$(PYTHON)
export SPARK_LOCAL_IP := 127.0.0.1
unexport SPARK_HOME
# Tests and benchmarks start hundreds of processes; none of them is to compile everything again.
unexport PYTHONDONTWRITEBYTECODE
WITH_JAVA = java_home="$$($(PYTHON) scripts/java_home.py)" && JAVA_HOME="$$java_home"

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv test check demo lint wheel soak endure fuzz bench simulate docs clean

help:  ## Show this list
	@sed -n 's/^\([a-z]*\):[^#]*## /\1	/p' Makefile

venv: $(STAMP)  ## Build .venv, or bring it up to date

$(STAMP): pyproject.toml constraints.txt scripts/make_venv.sh
	sh scripts/make_venv.sh $(VENV)
	$(PYTHON) -m pip install --disable-pip-version-check --editable '.[connect,demo,dev,spark]' --constraint constraints.txt
	touch $@

# Tests sync thousands of small files, which takes a third of their time on a disk: in memory where there is space.
SPACE_KIB := $(shell df -k /dev/shm 2>/dev/null | awk 'NR == 2 {print $$4}')
IN_MEMORY := $(shell test "0$(SPACE_KIB)" -gt 8388608 && test -w /dev/shm && echo TMPDIR=/dev/shm)

# TIDEMARK_NO_CEPH=1 make test: as on a machine without Ceph. IN_MEMORY= make test: on the disk.
test: $(STAMP)  ## Run the tests
	$(WITH_JAVA) $(IN_MEMORY) $(PYTEST) -n $(WORKERS) --dist loadfile -m "not soak and not slow"

check: $(STAMP)  ## Run them and the slow ones, as continuous integration does (half an hour on 2 cores)
	$(WITH_JAVA) $(IN_MEMORY) $(PYTEST) -n $(WORKERS) --dist loadfile -m "not soak"

# STORE=s3 starts an S3 server for it (Ceph RGW where that is installed, else moto); any other STORE is a URL.
demo: $(STAMP)  ## Lose a machine in the middle of a streaming job, and get its state back (STORE=s3: on S3)
	$(WITH_JAVA) $(PYTHON) demo/flights.py

lint: $(STAMP)  ## Check style, types and the import rule
	! git grep -nE '^(<{7}|>{7}) ' # left by a merge
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(VENV)/bin/lint-imports

wheel: $(STAMP)  ## Build the wheel, install it with its dependencies into a new environment, and use it there
	sh scripts/try_wheel.sh $(PYTHON)

soak: $(STAMP)  ## Try to break the protocol: 100,000 schedules, every crash point (under 30 minutes on 2 cores)
	$(PYTHON) -m tests.simulation.campaign --seed 1 --runs 100000 --at-least 1000
	$(PYTEST) -n 2 -m soak tests/simulation --timeout 1800

# The kinds of checkpoints are taken through a loss with these releases of PySpark too.
SPARKS ?= 4.1.4 4.0.5
endure: $(STAMP)  ## Run the other tests that take minutes: real processes killed, faults of servers, Spark's plans
	$(WITH_JAVA) $(PYTEST) -n 2 --dist loadfile -m soak --ignore tests/simulation \
		--ignore tests/spark/checkpoint/test_matrix.py --timeout 3600
	$(WITH_JAVA) $(IN_MEMORY) sh scripts/matrix.sh $(PYTHON) $(SPARKS)

# TARGET is a name of tests/fuzz/table.py; without one, all of them are fuzzed, SECONDS each.
TARGET ?=
SECONDS ?= 30
fuzz: $(STAMP)  ## Fuzz the parsers, guided by coverage, SECONDS each (TARGET=: one of them), and keep what was found
	$(PYTHON) -m pip install --disable-pip-version-check --quiet --editable '.[fuzz]' --constraint constraints.txt
	$(PYTHON) -m tests.fuzz.campaign --seconds $(SECONDS) $(TARGET)

# The same SEED gives the same histories, byte for byte. A violation is shown with its seed and its shortest schedule.
SEED ?= 1
RUNS ?= 1000
simulate: $(STAMP)  ## Run RUNS seeded schedules from SEED on against the protocol, and count what they have met
	$(PYTHON) -m tests.simulation.campaign --seed $(SEED) --runs $(RUNS)

# PART chooses: `peers` or one of its works, `guard`, `throughput`, `replay`, `summary`, `help`; else it is a part of the
# name of a benchmark of our own (diff, collect, state_load, ...), all of them if empty. ARGS are the options of what runs:
# make bench PART=small ARGS="--to disk --rounds 5"
PART ?=
ARGS ?=
PEER_WORKS := small mid big state incremental present stores spark hanging load read start
bench: $(STAMP)  ## Run the benchmarks (PART=help: which there are; PART=peers: against rclone, restic and others)
ifeq ($(PART),help)
	@echo "PART= of make bench, with options in ARGS= (ARGS=--help lists them):"
	@echo "  peers       all works against the peers: $(PEER_WORKS); or one of these names"
	@echo "  guard       this tree against the last release, or against ARGS=\"--base COMMIT\": which works became slower"
	@echo "  throughput  GB a minute and TiB an hour, for 4, 8 and 16 GB, and a forecast"
	@echo "  replay      restore against the replay of a changelog"
	@echo "  summary     one table and one plot of the newest results"
	@echo "  (empty)     our own, with nobody beside: $(patsubst benchmarks/bench_%.py,%,$(wildcard benchmarks/bench_*.py))"
else ifeq ($(PART),peers)
	$(PYTHON) -m benchmarks.peers $(ARGS)
else ifneq ($(filter $(PART),$(PEER_WORKS)),)
	$(PYTHON) -m benchmarks.peers --work $(PART) $(ARGS)
else ifeq ($(PART),guard)
	$(PYTHON) -m benchmarks.guard $(ARGS)
else ifeq ($(PART),throughput)
	$(PYTHON) -m benchmarks.throughput $(ARGS)
else ifeq ($(PART),replay)
	$(PYTHON) -m benchmarks.bench_replay $(ARGS)
else ifeq ($(PART),summary)
	$(PYTHON) -m benchmarks.summary $(ARGS)
else
	$(WITH_JAVA) $(PYTEST) benchmarks -k "$(PART)" --timeout 1800 $(ARGS)
endif

docs: $(STAMP)  ## Write the reference, and what the commands in the documents print
	$(PYTHON) -m tests.docs.reference
	$(PYTHON) -m tests.docs.console README.md benchmarks/README.md $$(find docs -name '*.md' -not -path 'docs/reference/*')

clean:  ## Remove everything that was built
	rm -rf $(VENV) .venv-spark-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .benchmarks
	find . -type d -name __pycache__ -prune -exec rm -rf {} +
