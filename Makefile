# Paceline: every target sets up .venv by itself on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV_READY := $(VENV)/.ready-dev
PIP_INSTALL := $(BIN)/pip install --quiet --quiet --disable-pip-version-check
# Chats, because that is what the shipped drafter was trained on.
WITH_DRAFTER := --chat --drafter-path drafter/pretrained/smollm2-135m
ROOMS := cluster scheduler kernels workers drafter deploy

.DEFAULT_GOAL := help
.PHONY: help setup serve chat test test-slow lint format types stubs chart bench bench-peers clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(DEV_READY) ## make .venv with pinned dependencies

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Paceline needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Setting up $(VENV): a few minutes the first time"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) --constraint constraints.txt --editable .
	@touch $(READY)

$(DEV_READY): $(READY)
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@# The reference drafter, an oracle of the tests; what it declares is for its own benchmarks.
	@$(PIP_INSTALL) --no-deps dflash==0.1.0
	@touch $(DEV_READY)

serve: $(READY) ## serve the default model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@$(BIN)/paceline serve $(ARGS)

chat: $(READY) ## talk to a running server in the terminal
	@$(BIN)/paceline chat $(ARGS)

test: $(DEV_READY) ## the test suite (about ten minutes on two cores)
	@$(BIN)/python -m pytest -q $(ARGS)

test-slow: $(DEV_READY) ## the tests marked slow
	@$(BIN)/python -m pytest -q -m slow $(ARGS)

lint: $(DEV_READY) ## ruff: style and imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: $(DEV_READY) ## ruff: mend what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: $(DEV_READY) ## pyright; tests see the package through links under build/typing
	@mkdir -p build/typing/paceline
	@for room in $(ROOMS); do ln -sfn ../../../$$room build/typing/paceline/$$room; done
	@ln -sfn ../../../__init__.py build/typing/paceline/__init__.py
	@$(BIN)/pyright --project pyproject.toml

stubs: $(READY) ## generate the Python of deploy/grpc/paceline.proto again
	@$(BIN)/python -m paceline.deploy.grpc.generate

chart: $(DEV_READY) ## the chart's README table, dashboard and golden renders, made again
	@cp deploy/dashboards/paceline.json helm/paceline/dashboards/paceline.json
	@$(BIN)/python helm/readme.py
	@UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q tests/helm -k as_before

bench: $(READY) ## throughput and latency of this checkout on this machine
	@$(BIN)/python -m paceline.deploy.bench.peers $(WITH_DRAFTER) \
		--only paceline --only paceline-ngram --only paceline-dflash $(ARGS)

bench-peers: $(READY) ## the same beside vLLM's CPU build, llama.cpp and transformers
	@$(BIN)/python -m paceline.deploy.bench.peers $(WITH_DRAFTER) $(ARGS)

clean: ## remove the environment and everything built
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis
