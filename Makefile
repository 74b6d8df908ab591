# Each target sets up what it needs by itself.  `make` alone lists them.
#   PYTHON=python3.12 make test         another interpreter (3.11 or newer) for the environment in .venv
#   READY_PYTHON=/path/bin/python ...  a ready environment instead of .venv; .ci/run uses it to test the wheel

PYTHON ?= python3
PORT ?= 8080
SEEDS ?= 200
VENV := .venv

ifdef READY_PYTHON
PY := $(READY_PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif
BIN := $(dir $(PY))

PIP_INSTALL = -m pip install --disable-pip-version-check -qq  # errors only
REQUIRE_PYTHON = import sys; sys.version_info >= (3, 11) or sys.exit("kvgate needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.11" % sys.version_info[:2])

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-ops test-vllm mutants faults sim soak bench incident peak honest experiment check fmt wheel constraints clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: $(READY) ## Start a demo on port 8080 (or PORT=...): embedded Valkey, two pools of mock engines, a fresh key
	@exec $(BIN)kvgate serve --demo --port $(PORT)

test: $(READY) ## Run the tests against what is installed in the environment
	@PYTHONSAFEPATH=1 $(PY) -m pytest -n 4 --dist loadfile --no-loadscope-reorder $(ARGS)

test-ops: $(READY) ## Sentinel, Cluster, and the ledger on redis-server by TLS; installs Debian programs where it may
	@PYTHONSAFEPATH=1 $(PY) tests/ops/run.py $(ARGS)

test-vllm: $(READY) ## Set up a real vLLM for CPUs (2.5 GB in .venv-vllm), compare the mock with it, and gate it
	@$(PY) tests/vllm/environment.py
	@KVGATE_TEST_VLLM=1 PYTHONSAFEPATH=1 $(PY) -m pytest -p no:xdist -s --session-timeout 7200 tests/vllm $(ARGS)

mutants: $(READY) ## Plant every fault in the ledger and show how soon it is found (8 minutes)
	@$(PY) -m tests.conformance.hunt $(ARGS)

faults: $(READY) ## Every fault on real processes (5 minutes): writes docs/reliability.md
	@$(PY) -m tests.faults.report $(ARGS)

sim: $(READY) ## Gateways, engines and clients under a virtual clock, with losses and crashes: SEEDS=200
	@$(PY) -m tests.sim --seeds $(SEEDS) $(ARGS)

soak: $(READY) ## The same minute for half an hour: what is kept of it has to stay flat
	@$(PY) benchmarks/soak.py $(ARGS)

bench: $(READY) ## kvgate beside other proxies on one core (15 minutes): figures, ratios, and whether the bars hold
	@$(PY) benchmarks/bench.py $(ARGS)

incident: $(READY) ## Play the incident three times, write build/incident/report.html and docs/incident.svg, check the bounds
	@$(PY) benchmarks/incident.py --svg docs/incident.svg

peak: $(READY) ## 2,400 sessions against 240, through kvgate; writes build/peak/report.html
	@$(PY) benchmarks/peak.py

honest: $(READY) ## How soon and how truly is refused: a flood of long prompts, and overload (8 minutes); checks the bounds
	@$(PY) benchmarks/honest.py $(ARGS)

experiment: $(READY) ## Ways of admitting calls beside each other, simulated (half an hour): docs/utilisation.md and its bounds
	@$(PY) -m benchmarks.experiment $(ARGS)

check: $(READY) ## Lint, format, types, import arrows, Dockerfile, licences and files
	@echo "ruff check" && $(BIN)ruff check .
	@echo "ruff format" && $(BIN)ruff format --check .
	@echo "mypy" && $(BIN)mypy
	@echo "lint-imports" && $(BIN)lint-imports --no-logo
	@echo "hadolint" && $(BIN)hadolint Dockerfile
	@echo "tests/repo" && PYTHONSAFEPATH=1 $(PY) -m pytest -q tests/repo

fmt: $(READY) ## Format the code and apply safe fixes
	@$(BIN)ruff check --fix --exit-zero .
	@$(BIN)ruff format .

wheel: $(READY) ## Build dist/kvgate-*.whl
	@$(PY) -m build --wheel --no-isolation --outdir dist

constraints: ## Rewrite constraints.txt with the newest releases that pyproject.toml allows
	@$(PYTHON) -c '$(REQUIRE_PYTHON)'
	@rm -rf $(VENV)-constraints && $(PYTHON) -m venv $(VENV)-constraints
	@$(VENV)-constraints/bin/python $(PIP_INSTALL) -e '.[embedded,dev]'
	@$(VENV)-constraints/bin/python -m pip --disable-pip-version-check freeze --exclude-editable > constraints.txt
	@rm -rf $(VENV)-constraints

clean: ## Remove the environment, builds and caches
	@rm -rf $(VENV) $(VENV)-constraints $(VENV)-vllm build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@find gateway tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c '$(REQUIRE_PYTHON)'
	@echo "Setting up $(VENV)"
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[embedded,dev]'
	@touch $@
