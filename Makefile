# What a newcomer types: make demo, make test. What a developer types: make check. Everything runs in .venv, made on first use;
# test-gpu and bench-gpu run with the torch at hand (PYTHON=..., or .venv where it is) and download nothing.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Compiled code is kept, whatever the caller prefers: else each worker compiles all tests, and each process the library, anew.
export PYTHONDONTWRITEBYTECODE :=

# Tests wait a good part of their time: one process more than there are cores, and four are enough.
TESTERS := $(shell $(PYTHON) -c 'import os; print(min(4, 1 + (os.cpu_count() or 1)))')

.PHONY: demo test test-torch test-gpu check bench bench-gpu proof figures docs clean

DEMO := compare --overwrite --fork --workers 4 --slow 3:3 --samples 24576 --sync bsp --sync ssp:3 --sync asp --sync bsp+balance --sync anytime:auto

demo: $(INSTALLED)
	$(BIN)/polytempo $(DEMO) --out out/demo/records --picture out/demo/accuracy.png --json out/demo/results.json examples/digits.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -n $(TESTERS) --dist worksteal

# By hand, not in CI: make test-torch TORCH=2.15.0. The quick part of the suite, in about ten minutes on two cores, with a torch and
# newest packages in an environment of its own: a build with CUDA is a download of 2.6 GB, once, and takes 5.5 GB on the disk.
WITH_TORCH = .venv-torch-$(TORCH)

test-torch:
	@test -n "$(TORCH)" || { echo "expected a version of torch: make test-torch TORCH=2.15.0"; exit 2; }
	@test -x $(WITH_TORCH)/bin/python || $(PYTHON) -m venv $(WITH_TORCH)
	@$(WITH_TORCH)/bin/python -m pip install -q --disable-pip-version-check torch==$(TORCH) -e '.[plots,dev]'
	$(WITH_TORCH)/bin/python -m pytest -q -n $(TESTERS) --dist worksteal -m "not long" -k "not ipc" --quick tests/pure tests/tensors tests/threads
	$(WITH_TORCH)/bin/python -m pytest -q tests/processes/test_torch_backend.py

# On a machine with a GPU; elsewhere they say why there is nothing to do.
AT_HAND := $(if $(filter file default,$(origin PYTHON)),$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)),$(PYTHON))

test-gpu:
	@PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(AT_HAND) tests/gpu/run_all.py $(ARGS)

bench-gpu:
	@PYTHONPATH="$(CURDIR)/src$${PYTHONPATH:+:$$PYTHONPATH}" $(AT_HAND) benchmarks/gpu.py $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q -n $(TESTERS) --dist worksteal -m "not long" -k "not ipc" --quick tests/pure tests/threads

bench: $(INSTALLED)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/run.py $(ARGS)

proof: $(INSTALLED)
	$(BIN)/python benchmarks/proof.py $(ARGS)
	$(BIN)/python -m pytest -q --proof -m proof
	$(BIN)/python -m pytest -q --proof tests/pure/test_exhaustive.py tests/pure/test_adpsgd_model.py tests/pure/test_decoupled.py

figures: $(INSTALLED)
	$(BIN)/python docs/figures/bounds.py
	$(BIN)/python docs/figures/stable_rates.py
	$(BIN)/python docs/figures/modes.py
	$(BIN)/python docs/figures/pipelines.py
	$(BIN)/python docs/figures/local_steps.py
	$(BIN)/python docs/figures/uneven.py
	$(BIN)/polytempo simulate --workers 8 --slow 7:3 --train digits --sync bsp --sync asp --sync examples/own_mode.py:K_BATCH:6 --picture docs/figures/own-mode.png
	$(BIN)/polytempo $(DEMO) --out out/demo/records --picture docs/figures/demo.png examples/digits.py
	$(BIN)/polytempo simulate --scaling --bandwidth 1Gb/s --model 100MB --step-time 250ms --picture docs/figures/scaling.png

docs: $(INSTALLED)
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv: a minute or two, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[plots,dev]'
	@touch $@

clean:
	rm -rf .venv .venv-torch-* out
