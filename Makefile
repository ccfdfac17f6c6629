# Everyday entry points. `make demo` and `make test` set up all they need on a machine without a GPU.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRACES ?= ../shared/traces

# SGLang on a few shared cores: default OpenMP threads make decode many times slower, and compiling brings nothing.
export OMP_NUM_THREADS ?= 1
export TORCH_COMPILE_DISABLE ?= 1
# Images often set this; then each of the many processes compiles SGLang and torch anew, which is most of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test venv lint format bench clean

demo: $(READY)  ## launch the tiny M3 on SGLang, replay a trace, show the report
	$(BIN)/agentserve demo

test: $(READY)  ## all tests
	$(BIN)/python -m pytest

venv: $(READY)

# Where pip is set up for a CPU build of torch, --no-deps takes it as it is. Where there is none, the one on PyPI
# was built for CUDA and cannot be imported without its libraries: then they come too (3 GB more).
$(READY): requirements/cpu.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "agentserve needs Python 3.11 or later, this is %d.%d; run make PYTHON=python3.11 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --requirement requirements/cpu.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile "$$(grep '^torch==' requirements/cpu.txt)"
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
	$(BIN)/python -m eval.bench.offload_restore --rounds 3
	$(BIN)/python -m eval.bench.eagle3_hits
	$(BIN)/python -m eval.bench.report_scale --requests 50000
	$(BIN)/python -m eval.bench.policy_cost --rounds 3
	$(BIN)/python -m eval.bench.stats_speed $(TRACES)
	$(BIN)/python -m eval.bench.fuzz_readers
	$(BIN)/python -m eval.bench.diagnose_scale
	$(BIN)/python -m eval.bench.planted_causes
	$(BIN)/python -m eval.bench.simulator_speed $(TRACES)
	$(BIN)/python -m eval.bench.policy_table $(TRACES)/weka-claude-code.tar.xz --sessions 28 --think-cap 60 --orders 3
	$(BIN)/python -m eval.bench.prediction $(TRACES)/weka-claude-code.tar.xz --tokens-per-block 2 --out runs/prediction

clean:
	rm -rf $(VENV) .cache build *.egg-info
