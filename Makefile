.PHONY: demo test check
PYTHON ?= python3
VENV := .venv
CORPUS ?= stdlib
OUT ?= runs/demo

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

# torch goes first and pinned, so that no looser range is resolved to another build
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q -c constraints.txt torch
	$(VENV)/bin/python -m pip install -q -c constraints.txt -e '.[dev]'
	touch $@
