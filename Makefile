# Every target works in a fresh clone: it first brings its environment to what it needs.
.DEFAULT_GOAL := help
# Two targets must not install into .venv at the same time.
.NOTPARALLEL:

PYTHON ?= python3
TORCH ?=
ARGS ?=
TESTS ?= tests
PYTEST_ARGS ?=
export PYTHON TORCH

BIN := .venv/bin
BENCHMARKS := backward jac rows gram cut memory cut_memory trace startup

.PHONY: help bench test check setup docs benchmarks peers clean runtime docs-setup

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile
	@printf '%s\n' '' 'Variables:' \
	    '  ARGS="..."         arguments of multiback bench:  make bench ARGS="slices --quick"' \
	    '                     or of the benchmarks:         make benchmarks ARGS="--smoke"' \
	    '  TESTS=PATH         run these tests only:          make test TESTS=tests/test_graph.py' \
	    '  PYTEST_ARGS="..."  more arguments of pytest:      make test PYTEST_ARGS="-x -k graph"' \
	    '  TORCH="..."        another build of torch:        make bench TORCH="torch==2.14.1"' \
	    '  PYTHON=PATH        the Python that makes .venv:   make setup PYTHON=python3.12'

bench: runtime ## install what multiback needs to run, then run: multiback bench $(ARGS)
	$(BIN)/multiback bench $(ARGS)

test: setup ## run the tests in parallel and report the coverage
	$(BIN)/python -m pytest -n logical --cov=multiback --cov-report=term-missing:skip-covered $(PYTEST_ARGS) $(TESTS)

check: setup ## check style, types, the layering of imports and the documentation's examples
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m pytest README.md docs src

setup: ## install everything for development: multiback, the test group and every extra
	@sh scripts/environment.sh setup

docs: docs-setup ## build the documentation into docs/_build/html
	$(BIN)/python -m sphinx -W -b html docs docs/_build/html

benchmarks: peers ## run every script in benchmarks/ beside the peers, each with $(ARGS), and fail where one fails
	@status=0; for script in $(BENCHMARKS); do \
	    .venv-peers/bin/python benchmarks/$$script.py $(ARGS) || status=1; echo; \
	done; exit $$status

peers: ## install, into .venv-peers, multiback and the libraries that the benchmarks compare it with
	@sh scripts/environment.sh peers

clean: ## remove caches, coverage data and the built documentation; .venv and .venv-peers stay
	rm -rf docs/_build build dist htmlcov .coverage .coverage.* .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples scripts docs benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

runtime:
	@sh scripts/environment.sh runtime

docs-setup:
	@sh scripts/environment.sh docs
