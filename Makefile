# make reproduce   set up .venv, make the runs of every sweep, draw every figure  [SCALE=quick] [JOBS=2]
# make test        set up .venv, run every check that CI runs
# make docs        build the site into docs/_build/html
# make bench       measure, one run at a time, and write data/benchmarks
# make clean       remove .venv, the site and the caches; runs/ stays

PYTHON ?= python3
SCALE ?= quick
JOBS ?=
BIN := .venv/bin
comma := ,

.PHONY: help reproduce test docs bench clean
help:
	@sed -n '/^# make/s/^# //p' Makefile

reproduce: .venv/installed
	$(BIN)/kl_comedy reproduce --scale $(SCALE) $(if $(JOBS),--jobs $(JOBS))

# The checks may not touch a hub; each process has one thread, since two work at a time.
test docs: export HF_HUB_OFFLINE = 1
test: export OMP_NUM_THREADS = 1
test: .venv/installed-dev
	$(BIN)/python -m pytest -q tests/test_repository.py
	$(BIN)/ruff check kl_comedy nbs tests docs
	$(BIN)/ruff format --check nbs tests docs
	$(BIN)/nbdev_test --path nbs --n_workers 2
	$(MAKE) docs
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/test_repository.py tests

docs: .venv/installed-dev
	$(BIN)/python docs/build.py

bench: .venv/installed
	$(BIN)/kl_comedy reproduce benchmarks --scale bench
	mkdir -p data/benchmarks
	cp runs/benchmarks/bench/*.csv data/benchmarks/

clean:
	rm -rf .venv docs/_build docs/_src _proc _docs .pytest_cache .ruff_cache

# install,STAMP,WHAT installs WHAT into .venv, one make at a time: pip inherits the lock (on this
# Makefile), so it is held while anything that a killed make has left behind still installs. An
# installation that was cut short leaves .venv/unfinished, and .venv is then made anew.
define install
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' || \
	{ echo "$(PYTHON) has no venv; on Debian: apt-get install python3-venv"; exit 1; }
@$(PYTHON) -c 'import fcntl, os, sys; lock = open("Makefile"); fcntl.flock(lock, fcntl.LOCK_EX); \
	os.set_inheritable(lock.fileno(), True); os.execvp("sh", ["sh", "-ec", sys.argv[1]])' '\
	if [ $(1) -nt pyproject.toml ] && [ $(1) -nt constraints.txt ]; then exit; fi; \
	if [ -e .venv/unfinished ]; then rm -rf .venv; fi; \
	mkdir -p .venv; touch .venv/unfinished; \
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv .venv; \
	echo "installing into .venv: 2 GB, a few minutes"; \
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e "$(2)"; \
	touch .venv/installed $(1); rm .venv/unfinished'
endef

.venv/installed: pyproject.toml constraints.txt
	$(call install,$@,.)

.venv/installed-dev: pyproject.toml constraints.txt
	$(call install,$@,.[dev$(comma)docs])
