# The newcomer's two commands are `make demo` and `make test`. Everything installs into .venv/, nothing outside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Only files that git tracks: what was recorded or downloaded here is nobody's spelling.
TEXT = $$(git ls-files '*.py' '*.md' '*.toml' '*.cfg' '*.j2' '*.js' '*.css' Makefile 2>/dev/null)

# One worker per core, at most four; the tests of a file stay on one worker and share its fixtures.
WORKERS := -n auto --maxprocesses 4 --dist loadfile

# The tests of GPUs run with an interpreter that was named, as it is: a machine with GPUs often has no network.
NAMED := $(filter command environment,$(origin PYTHON))
GPU_PYTHON := $(if $(NAMED),$(PYTHON),$(BIN)/python)

.PHONY: help demo test test-gpu test-processes test-all docs lint audit release clean
help:
	@echo 'make demo      record a small run, show its report and write its page (first result, a few minutes)'
	@echo 'make test      linters, types, import contracts and the fast tests; those of GPUs where there are some'
	@echo 'make test-gpu  the tests that need GPUs, where their code has changed since they passed; PYTHON=python3 uses that'
	@echo '               interpreter and installs nothing; GPU="--output FOLDER" and others: see scripts/gpu_ledger.py'
	@echo 'make test-processes  the tests that start ranks, clusters or a browser'
	@echo 'make test-all  make test, make test-processes, make audit, the long tier, and analysis on every Python found'
	@echo 'make docs      the documentation as a site, with the reference of the Python API'
	@echo 'make release   wheel and sdist in dist/, checked and tried in fresh environments; publishes nothing'
	@echo 'make clean     remove .venv/ and caches'

demo: $(VENV)/.record
	@echo '[3/4] recording a small zigzag run (all visible GPUs, else 4 CPU processes)'
	@$(BIN)/python -m ringprof record --strategy zigzag $$($(BIN)/python scripts/demo_size.py) --output traces/run.json
	@echo '[4/4] its report, and the same as a page'
	@$(BIN)/python -m ringprof report traces/run.json --html traces/report.html
	@echo
	@echo 'done. Activate the environment:   . $(BIN)/activate'
	@echo 'and try next:                     ringprof report traces/h200x4-zigzag-262144'
	@echo 'Open the page in a browser:       file://$(CURDIR)/traces/report.html'

test: $(VENV)/.dev lint
	$(BIN)/python -m pytest -m 'not long and not processes' $(WORKERS) $(PYTEST)
	@! nvidia-smi -L >/dev/null 2>&1 || $(BIN)/python scripts/gpu_ledger.py --run --limit 3600

test-gpu: $(if $(NAMED),,$(VENV)/.dev)
	@$(GPU_PYTHON) scripts/gpu_ledger.py --run $(GPU)

test-processes: $(VENV)/.dev .venv-hta/made
	$(BIN)/python -m pytest -m 'processes and not long and not gpu' $(WORKERS) $(PYTEST)

# Audited last, so that what could not be audited is the last word.
test-all: test test-processes
	$(BIN)/python -m pytest -m long $(PYTEST)
	$(BIN)/python scripts/every_python.py
	@$(MAKE) audit

docs: $(VENV)/.dev
	$(BIN)/python scripts/build_docs.py

release: $(VENV)/.dev
	@test -z "$$(git status --porcelain)" || { echo 'a release is made of what is committed; commit first'; exit 1; }
	@$(BIN)/python scripts/release.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell $(TEXT)
	$(BIN)/python scripts/lint_words.py
	@$(BIN)/python scripts/gpu_ledger.py

audit: $(VENV)/.dev
	$(BIN)/bandit -q -r ringprof strategies -ll
	$(BIN)/python scripts/audit.py $(OSV)

# Stamps say which set of packages the environment holds; a changed setup.cfg or constraint installs again.
$(VENV)/.made: scripts/check_python.py
	@$(PYTHON) scripts/check_python.py
	@echo '[1/4] making a virtual environment in $(VENV)/ with' "$$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.record: $(VENV)/.made setup.cfg pyproject.toml constraints.txt
	@echo '[2/4] installing ringprof and what recording needs (torch is large: the first time takes a while)'
	@$(BIN)/python scripts/install.py record
	@touch $@

$(VENV)/.dev: $(VENV)/.record
	@echo 'installing the development tools'
	@$(BIN)/python scripts/install.py record,dev
	@touch $@

# Says why where it cannot be made, and does not try again until setup.cfg changes.
.venv-hta/made: setup.cfg scripts/install_hta.py | $(VENV)/.dev
	@$(BIN)/python scripts/install_hta.py
	@touch $@

clean:
	rm -rf $(VENV) .venv-hta build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
