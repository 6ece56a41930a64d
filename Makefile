# Few verbs. `make demo` and `make test` need only Python 3.11+ and make; each does its own set-up.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export DO_NOT_TRACK := 1

# Dagster's own storage and settings: with DAGSTER_HOME unset, its storage would vanish with the process.
DAGSTER_SETTINGS = home=$$($(BIN)/python -m resources.embedded.home) && mkdir -p $$home/dagster && \
	cp dagster.yaml $$home/dagster/

.PHONY: demo demo-governed test lint check bench ui down clean

demo: $(VENV)/ready          ## publish a week of flights, then show what the journal knows
	@$(DAGSTER_SETTINGS)
	@$(BIN)/python -m assets.demo

demo-governed: $(VENV)/ready ## load a stored procedure's mart by a manifest: once passing, once stopped by a gate
	@$(DAGSTER_SETTINGS)
	@$(BIN)/python -m assets.demo_governed

test: $(VENV)/ready          ## pass the tests; they start and stop their own engines
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(VENV)/ready          ## style, types, import direction
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

check: lint test             ## everything that must hold before a commit

bench: $(VENV)/ready         ## measure; writes build/bench.json
	$(BIN)/python -m tests.bench

ui: $(VENV)/ready            ## the Dagster UI on the demo's home, on loopback
	@$(DAGSTER_SETTINGS) && DPONE_HOME=$$home DAGSTER_HOME=$$home/dagster \
		$(BIN)/dagster dev -h 127.0.0.1 -p $(or $(PORT),3000) -w workspace.yaml

down: $(VENV)/ready          ## stop the embedded engines
	$(BIN)/dpone down

clean: down                  ## stop the engines and forget the demo's data
	rm -rf "$$($(BIN)/python -m resources.embedded.home)" build

$(VENV)/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || \
		{ echo "Python 3.11, 3.12 or 3.13 is needed; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "Installing into $(VENV) (about 2 GB, a minute or two) ..."
	$(PYTHON) -m venv $(VENV)
	# The lock is whole, so nothing is resolved here.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@
