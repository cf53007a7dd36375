# What a newcomer types: make demo, make test. What a developer types: make check. Everything runs in .venv, made on first use.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test check bench proof figures clean

demo: $(INSTALLED)
	$(BIN)/polytempo simulate --workers 4 --slow 3:3 --train digits --sync bsp --sync ssp:3 --sync dssp:3..15 --sync asp \
	    --picture out/demo/accuracy.png --json out/demo/results.json

test: $(INSTALLED)
	$(BIN)/python -m pytest

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/pure

bench: $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py $(ARGS)

proof: $(INSTALLED)
	$(BIN)/python benchmarks/proof.py $(ARGS)

figures: $(INSTALLED)
	$(BIN)/python docs/figures/make.py

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[plots,dev]'
	touch $@

clean:
	rm -rf .venv out
