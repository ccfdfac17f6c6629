# Everyday entry points. `make demo` and `make test` set up all they need on a machine without a GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# SGLang on a few shared cores: default OpenMP threads make decode many times slower, and compiling brings nothing.
export OMP_NUM_THREADS ?= 1
export TORCH_COMPILE_DISABLE ?= 1

.PHONY: demo test venv lint format bench clean

demo: $(READY)  ## launch the tiny M3 on SGLang, replay a trace, show the report
	$(BIN)/agentserve demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest

venv: $(READY)

$(READY): requirements/cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentserve needs Python 3.11 or later, this is %d.%d; run make PYTHON=python3.11 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	touch $(READY)

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## every number that README and docs state
	$(BIN)/python -m eval.bench.prefill_cost

clean:
	rm -rf $(VENV) .cache build *.egg-info
