# Every target does its own set-up; see CONTRIBUTING.md.
#
#   make demo     train a small model on this machine's Python library, state on the host
#   make test     run the tests
#   make check    all that CI runs: lint, types, layers, native tests, tests
#   make slow     the full matrices
#   make sanitize the native tests under address, undefined and thread sanitizers
#   make docs     build the documentation site into site/
#   make wheel    build a wheel into dist/
#
# PYTHON=python3.12 names the interpreter, VENV=path an environment (made if it is missing, used
# as it is if it exists: its own torch stays).

PYTHON ?=
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
export PYTHON

BIN := $(VENV)/bin
DEPS := $(VENV)/.forebay-deps
READY := $(VENV)/.forebay-package
DOCS := $(VENV)/.forebay-docs
NATIVE := $(wildcard CMakeLists.txt native/*/*.* native/*/*/*.*)
CPP := $(wildcard native/*/*.cpp native/*/*.h native/*/*.inc native/*/*/*.h)

.PHONY: demo test check slow house lint types layers native-test sanitize docs wheel clean setup
.NOTPARALLEL:

setup: $(READY)

$(DEPS): pyproject.toml constraints/cpu.txt tools/setup
	@tools/setup deps $(VENV)
	@touch $@

$(READY): $(DEPS) $(NATIVE)
	@tools/setup package $(VENV)
	@touch $@

$(DOCS): $(DEPS)
	@tools/setup deps $(VENV) docs
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py --output runs/demo $(DEMO_ARGS)

test: $(READY)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

slow: $(READY)
	@$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

house: $(READY)
	@$(BIN)/python -m pytest tests/house $(PYTEST_ARGS)

lint: $(READY)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet . || { \
	    echo "hint: $(BIN)/ruff format ." >&2; exit 1; }
	@if [ -n "$(CPP)" ]; then $(BIN)/clang-format --dry-run -Werror $(CPP); fi
	@$(BIN)/codespell

types: $(READY)
	@$(BIN)/mypy

layers: $(READY)
	@$(BIN)/lint-imports --no-logo

native-test: $(READY)
	@tools/native-tests $(BIN) Release

sanitize: $(READY)
	@tools/native-tests $(BIN) address,undefined
	@tools/native-tests $(BIN) thread

check: lint types layers native-test test

docs: $(DOCS)
	@mkdir -p build
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict >build/docs.log 2>&1 || { \
	    cat build/docs.log >&2; exit 1; }
	@echo "the site is in site/"

wheel: $(READY)
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
