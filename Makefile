.PHONY: demo test check bench bench-check
PYTHON ?= python3
VENV := .venv
CORPUS ?= stdlib
OUT ?= runs/demo
RESULTS ?= benchmarks/results

demo: $(VENV)/.installed
	$(VENV)/bin/sferic run demo --out "$(OUT)" --set 'data.corpus="$(CORPUS)"'

test: $(VENV)/.installed
	$(VENV)/bin/python -m pytest -n 2

check: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright
	$(VENV)/bin/codespell
	$(VENV)/bin/lint-imports

# runs what this machine can; lists the rest
bench: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks --results "$(RESULTS)"

bench-check: $(VENV)/.installed
	$(VENV)/bin/python -m benchmarks.bench_check "$(RESULTS)/lightning-h200.json"

# torch goes first and pinned, so that no looser range is resolved to another build
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
