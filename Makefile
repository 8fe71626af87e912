# make up        install, fetch the model, start all four services and stream a first answer
# make test      the tests (minutes), a file on each core;  make test-full  with the long ones, one after the other
# make test-docker  the containers: built, started, killed, cut off, replaced under load (about six minutes; docs/containers.md)
# make test-page the page in a browser (apt-get install chromium, or QUARTET_CHROMIUM=...; two minutes)
# make lint      format, lint, types, the import law, generated code
# make fuzz      a million mutated frames over every socket (a quarter of an hour)
# make bench     measurements, as JSON
# make claims    the published claims of paged attention, measured here; ARGS=--quick takes two minutes
# make gpu-check correctness and rates on the GPU of this machine, under six minutes, as JSON (status 3: there is none)
# make chaos     kill, freeze and cut off services under streams for minutes; one JSON line
#
# PYTHON=python3.12        the interpreter for .venv (3.11 or newer; found by itself otherwise)
# TORCH_INDEX=URL          one more package index, for a smaller or another build of torch, such as
#                          https://download.pytorch.org/whl/cpu (on Linux the plain one is a CUDA build)
# ARGS='...'               more arguments for quartet serve, pytest or the benchmark

VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: up install test test-full test-page test-docker lint types format bench claims chaos fuzz gpu-check gpu-wheels clean

up: $(VENV)/.run
	@$(BIN)/quartet serve --demo $(ARGS)

install: $(VENV)/.run

# Files in their order, which puts those of short tests last, so that no core waits long for another at the end.
IN_PARALLEL := -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "not slow and not gpu and not docker and not page" $(IN_PARALLEL) $(ARGS)

# In a browser: Chromium is found on the PATH, or named by QUARTET_CHROMIUM.
test-page: $(VENV)/.dev
	@$(BIN)/python -m pytest -m "page" tests/page $(ARGS)

test-full: $(VENV)/.full
	@$(BIN)/python -m pytest -m "not gpu and not docker" --timeout 3600 $(ARGS)

# Needs docker with compose. QUARTET_TEST_COMPOSE_OVERRIDE=FILE adds a compose file, for how images are built here.
test-docker: $(VENV)/.dev
	@$(BIN)/python -m pytest -m docker --timeout 900 tests/docker $(ARGS)

lint: $(VENV)/.dev types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/lint_imports.py
	$(BIN)/python tools/generate_pb.py --check
	$(BIN)/python tools/generate_settings_docs.py --check

# The packages' import names differ from their folders; mypy sees them under these links.
types: $(VENV)/.dev
	@mkdir -p build/types/quartet
	@ln -sfn ../../../shared build/types/quartet/shared
	@ln -sfn ../../../services build/types/quartet/services
	cd build/types && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml -p quartet

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.run
	@$(BIN)/python -m bench $(ARGS)

claims: $(VENV)/.dev
	@$(BIN)/python -m bench.claims $(ARGS)

# Needs no install: PYTHON is one that has torch and triton, WHEELS what it lacks (see gpu-wheels).
WHEELS ?= build/gpu-wheels
gpu-check:
	@$(or $(PYTHON),$(BIN)/python) -m bench.gpu $(if $(wildcard $(WHEELS)),--wheels $(WHEELS)) $(ARGS)

# To be carried, with this folder, to a machine without a network.
gpu-wheels: $(VENV)/bin/python
	$(BIN)/python -m pip download -q --only-binary :all: --no-deps --python-version 3.12 --platform manylinux_2_28_x86_64 \
		--platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d $(WHEELS) pyzmq msgspec structlog llguidance numpy

# Nightly: a million mutated frames over every socket; ARGS='--seconds 60' for a look.
fuzz: $(VENV)/.dev
	@PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

chaos: $(VENV)/.run
	@$(BIN)/python -m bench.chaos $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@python="$(PYTHON)"; \
	for candidate in python3.11 python3.12 python3.13 python3.14 python3; do \
		[ -n "$$python" ] && break; \
		$$candidate -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			&& python=$$candidate; \
	done; \
	[ -n "$$python" ] || { echo "Python 3.11 or newer (with venv) is needed; name one with PYTHON=..." >&2; exit 1; }; \
	echo "creating $(VENV) with $$($$python --version)" >&2; \
	$$python -m venv $(VENV)

# One install after the other: pip does not like company (make -j). Stdout is the benchmarks' JSON.
$(VENV)/.run: $(VENV)/bin/python pyproject.toml constraints.txt setup.py $(wildcard services/executor/native/src/*)
	@echo "installing Quartet into $(VENV) (the first time takes some minutes: torch is large)" >&2
	@$(PIP_INSTALL) -e '.[all]' >&2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "installing what the tests and lints need" >&2
	@$(PIP_INSTALL) -qq -e '.[dev]' >&2
	@touch $@

$(VENV)/.full: $(VENV)/.dev
	@echo "installing what the long tests need" >&2
	@$(PIP_INSTALL) -qq -e '.[dev-full]' >&2
	@touch $@
