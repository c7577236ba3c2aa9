# Two commands on a fresh machine with Python and pip: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: demo test fast bench docs clean

demo: $(VENV)/installed  ## learn the digits, task after task, and show what came out
	$(BIN)/cps bench digits

test: $(VENV)/installed  ## every check: style, types, tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

fast: $(VENV)/installed  ## the tests that take less than two seconds each
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

bench: $(VENV)/installed  ## measure speed and memory against plain PyTorch, in the same run
	$(BIN)/python -m benchmarks

docs: $(VENV)/installed  ## write the documentation as a site to site/; warnings are errors
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open site/index.html"

clean:
	rm -rf $(VENV) runs site

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
