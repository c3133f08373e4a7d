# Two commands do everything: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint types test-cpu clean

demo: .venv/ready
	$(BIN)/fastconv bench

test: lint types test-cpu

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

test-cpu: .venv/ready
	$(BIN)/pytest -m "not gpu"

# Torch first and by its exact version: asked for by a range, pip may take the newest release, with
# gigabytes of CUDA packages that a machine without a GPU has no use for.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench,test]'
	touch $@

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis
