# `make serve` and `make test` are all that a newcomer needs; CONTRIBUTING.md explains the rest.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m
ARGS   ?=

NATIVE := CMakeLists.txt $(wildcard native/*)

.DEFAULT_GOAL := help
.PHONY: help serve run test lint types unit format oracle bench compare strategies peers roofline soak clean

help: ## Show the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

serve: $(VENV)/.installed ## Start a server on 127.0.0.1:8000 (MODEL=..., ARGS="--port 8001")
	@$(BIN)/shoal serve $(MODEL) $(ARGS)

run: $(VENV)/.installed ## Chat in the terminal
	@$(BIN)/shoal run $(MODEL) $(ARGS)

test: $(VENV)/.tested lint types unit ## Everything: lint, types, tests

lint: $(VENV)/.tested
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.tested
	@$(BIN)/mypy

unit: $(VENV)/.tested ## The tests alone (ARGS="-k scheduler")
	@$(BIN)/python -m pytest $(ARGS)

format: $(VENV)/.tested ## Format and sort
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

oracle: $(VENV)/.oracle ## Make the golden values again with HF transformers and compare
	@scripts/oracle.sh $(BIN)/python --check

bench: $(VENV)/.installed ## Throughput on 96 mixed requests, 32 at a time
	@$(BIN)/shoal bench throughput --model $(MODEL) --num-requests 96 --input-len 50:800 \
	    --output-len 20:200 --max-num-seqs 32 $(ARGS)

LOADS := --load 0.5 --load 0.75 --load 1.0

compare: $(VENV)/.bench ## Compare the strategies (5 minutes); with TRACE=FILE.csv also on a trace's requests
	@$(BIN)/shoal bench compare --model $(MODEL) --num-requests 14 --input-len 50:800 \
	    --output-len 20:200 $(LOADS) --output comparison-mixed.html $(ARGS)
ifdef TRACE
	@$(BIN)/shoal bench compare --model $(MODEL) --num-requests 12 --trace $(TRACE) \
	    --trace-max-input 800 --trace-max-output 200 $(LOADS) --output comparison-trace.html $(ARGS)
endif

strategies: $(VENV)/.installed ## What each strategy is worth (half an hour)
	@$(BIN)/python benchmarks/strategies.py $(ARGS)

peers: $(VENV)/.tested ## Compare with OpenVINO GenAI and llama.cpp in one run (installs them)
	@$(BIN)/python benchmarks/setup_peers.py
	@$(BIN)/python benchmarks/peers.py $(ARGS)

roofline: $(VENV)/.installed ## What this machine could do at best
	@$(BIN)/python benchmarks/roofline.py

soak: $(VENV)/.installed ## A steady load for 20 minutes, then a fresh server beside the aged one
	@$(BIN)/python benchmarks/soak.py --model $(MODEL) $(ARGS)

clean: ## Remove the virtual environment and what was built
	rm -rf $(VENV) build dist

$(BIN)/python:
	@scripts/check_machine.sh $(PYTHON)
	@echo "shoal: creating the virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# The native part is compiled here, once and whenever its sources change.
$(VENV)/.installed: pyproject.toml $(NATIVE) | $(BIN)/python
	@echo "shoal: installing dependencies and building the native runtime (a few minutes the first time)"
	@$(BIN)/python -m pip install --disable-pip-version-check --progress-bar on -q -e .
	@touch $@

$(VENV)/.tested: $(VENV)/.installed
	@echo "shoal: installing what the tests need"
	@$(BIN)/python scripts/extra.py test | $(BIN)/python -m pip install --disable-pip-version-check -q -r /dev/stdin
	@touch $@

$(VENV)/.bench: $(VENV)/.installed
	@echo "shoal: installing what the pictures need"
	@$(BIN)/python scripts/extra.py bench | $(BIN)/python -m pip install --disable-pip-version-check -q -r /dev/stdin
	@touch $@

$(VENV)/.oracle: $(VENV)/.tested
	@echo "shoal: installing torch and transformers for the golden values"
	@$(BIN)/python scripts/extra.py oracle | $(BIN)/python -m pip install --disable-pip-version-check -q -r /dev/stdin
	@touch $@
