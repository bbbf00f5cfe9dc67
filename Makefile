# Every target sets up .venv by itself; a second run finds the stamp and goes straight on.
# PYTHON picks the interpreter (3.11 or newer); the default is python3 when it is new enough.

VENV := .venv
STAMP := $(VENV)/.ready
BIN := $(VENV)/bin

.PHONY: setup demo test test-quick break format bench bench-profiling chaos soak

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt .ci/setup
	bash .ci/setup $(VENV)
	touch $@

demo: $(STAMP)
	$(BIN)/python -m splitserve.demo

test: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest

test-quick: $(STAMP)
	$(BIN)/python -m pytest tests/unit tests/contract

break: $(STAMP)
	$(BIN)/python -m pytest -m breaking

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/python -m benchmarks.compare --workload w1 --repeats 3

bench-profiling: $(STAMP)
	$(BIN)/python -m benchmarks.step_log smollm2-135m
	$(BIN)/python -m benchmarks.attribution
	$(BIN)/python -m benchmarks.remedies

chaos: $(STAMP)
	$(BIN)/python -m benchmarks.chaos

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak
