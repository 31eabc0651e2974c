# Everything a newcomer needs. Each target makes its virtual environment first if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CHECKOUT := $(VENV)/.checkout
EXTRAS ?= experiments,dev
WORKERS ?= 2
BENCHMARKS ?= sampling norm_choice performance accounting alc_estimation_cost batch_norm_step_cost

.PHONY: compare test test-slow opacus-tests audit lint format tutorials docs benchmarks release-check venv clean

compare: venv
	$(BIN)/python -m opacus_bc compare

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow"

test-slow: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Opacus's own tests, which come with its package, on this package's engine; tests/support/opacus_differences.py
# says which of them differ and why. Twice as many examples of property tests: EXAMPLES=8.
EXAMPLES ?= 4
opacus-tests: venv
	cd tests && OMP_NUM_THREADS=1 OPACUS_TESTS_EXAMPLES=$(EXAMPLES) $(abspath $(BIN))/python -m pytest -o addopts= -o filterwarnings= \
		-p no:cacheprovider -p support.opacus_plugin -n $(WORKERS) -q --pyargs opacus.tests

# Attacks every mode and writes docs/audit.md: some minutes on one core.
audit: venv
	OMP_NUM_THREADS=1 $(BIN)/python -m opacus_bc audit --quick --update docs/audit.md

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The scripts are the sources: notebooks are made from them and executed, each within three minutes on two cores.
NOTEBOOKS ?= $(patsubst %.py,%.ipynb,$(wildcard tutorials/*.py))
tutorials: venv
	$(BIN)/jupytext --quiet --update --to ipynb $(NOTEBOOKS:.ipynb=.py)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o addopts= --nbmake --nbmake-timeout=180 --durations=0 --overwrite $(NOTEBOOKS)
	$(BIN)/python .ci/strip_notebooks $(NOTEBOOKS)

# Warnings are errors. The site is in site/index.html; nothing in it is loaded from elsewhere.
docs: venv
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds wheel and sdist, installs the wheel into an empty environment and tests it there (several GB and minutes).
release-check: venv
	$(BIN)/python -m pip install --quiet -e ".[release]"
	BUILDER=$(abspath $(BIN)/python) WORKERS=$(WORKERS) .ci/release $(PYTHON) $(PINS)

# The scripts that need no data set; the others say in their docstring what they need.
benchmarks: venv
	failed=; for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || failed="$$failed $$name"; done; \
		[ -z "$$failed" ] || { echo "missed:$$failed"; exit 1; }

# The environment is installed once per pyproject.toml; the second stamp points a reused one at this checkout.
venv: $(STAMP)
	@if [ "$$(cat $(CHECKOUT) 2>/dev/null)" != "$(CURDIR)" ]; then \
		$(BIN)/python -m pip install --quiet --no-deps -e . && echo "$(CURDIR)" > $(CHECKOUT); fi

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install -e ".[$(EXTRAS)]"
	@echo "$(CURDIR)" > $(CHECKOUT)
	@touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site
