# Every target installs whatever it needs and is missing: on a fresh Debian machine with
# python3 and make, `make demo` is enough.

SHELL := /bin/sh
# The distribution's Python, because apt can install its venv module.
PYTHON ?= $(firstword $(wildcard /usr/bin/python3) python3)
# A PostgreSQL to use instead of a private one, with pg_partman and pg_cron.
DATABASE_URL ?= $(PILLARBOX_DATABASE_URL)
# Arguments for the command: make demo ARGS=--help
ARGS ?=
# The number of processes that share the tests. On two cores, six keep both busy, since tests
# spend most of their time waiting for a server or another process.
WORKERS ?= 6

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

COMPILE = $(BIN)/uv pip compile \
  --universal --python-version 3.11 --generate-hashes \
  --no-config --no-emit-index-url --no-emit-find-links \
  --custom-compile-command 'make lock' --quiet

# The tests that run again with the server in a container.
PARTITION_TESTS := tests/migrations tests/outbox/administration

# The extras installed in the image.
IMAGE_EXTRAS := cli migrations binary asyncpg redis kafka rabbitmq nats sqs http \
  jsonschema msgspec pydantic metrics otel web

# What these goals need from apt, as parts of docker/debian-packages.
needs := venv
ifneq ($(filter demo test examples bare clock fault servers mutants readme bench wheel setup,$(MAKECMDGOALS)),)
needs += $(if $(DATABASE_URL),,postgres)
endif
ifneq ($(filter test bare clock fault servers mutants readme bench wheel setup,$(MAKECMDGOALS)),)
needs += redis rabbitmq nats pgbouncer prometheus chromium faketime curl
else
# make demo ARGS='--broker nats'
needs += $(filter redis rabbitmq nats,$(ARGS))
endif
needs += $(if $(filter screenshots,$(MAKECMDGOALS)),postgres chromium)
needs += $(if $(filter reference,$(MAKECMDGOALS)),postgres)
ifneq ($(filter images containers,$(MAKECMDGOALS)),)
needs += docker
endif
# Tests that change a server's settings use a server on this machine.
ifneq ($(filter containers,$(MAKECMDGOALS)),)
needs += redis $(if $(DATABASE_URL),,postgres)
endif
ifneq ($(filter matrix servers,$(MAKECMDGOALS)),)
needs += debootstrap
endif

# The tests start hundreds of processes. Without bytecode on disk, each of them would compile
# every module that it imports, and each worker every test.
unexport PYTHONDONTWRITEBYTECODE

ifneq ($(DATABASE_URL),)
export PILLARBOX_DATABASE_URL := $(DATABASE_URL)
endif

.DEFAULT_GOAL := help
.PHONY: help demo test examples bare clock fault mutants readme bench wheel dist images containers matrix servers check format reference screenshots site lock setup clean packages jars

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo '  DATABASE_URL=postgresql://…  use that PostgreSQL and install none'
	@echo '  ARGS="…"                     arguments for demo, test, clock, mutants, bench and site'
	@echo '  PYTHON=…                     the Python (3.11 or newer) to build .venv with'

demo: packages $(READY) ## Run the example shop, with killed processes and a failing handler (ARGS=--web)
	@$(BIN)/python -m examples.shop $(ARGS)

test: packages $(READY) ## Run the tests (ARGS="-k lane")
	@$(BIN)/pytest -n $(WORKERS) $(ARGS)

examples: packages $(READY) ## Run the tests of the tutorial's shop and the two services, as projects
	@for project in orders two_services; do (cd examples/$$project && \
	  PILLARBOX_TEST_DATABASE_URL='$(DATABASE_URL)' $(CURDIR)/$(BIN)/pytest -q $(ARGS)) || exit; done

bare: packages $(READY) ## Run tests of the upkeep on servers without pg_partman
	@PILLARBOX_TEST_WITHOUT_PARTMAN=1 $(BIN)/pytest -n $(WORKERS) $(or $(ARGS),tests/outbox/administration)

clock: packages $(READY) ## Run the database's tests at other hours and on odd days (ARGS=--once)
	@$(BIN)/python -m tests.clock --workers $(WORKERS) $(ARGS)

fault: packages jars $(READY) ## Run the tests that break things, in their full numbers
	@$(BIN)/pytest -n $(WORKERS) -m "fault or variant or long" --full $(ARGS)

mutants: packages $(READY) ## Put faults into the code and show which no test finds (ARGS="--seed 2")
	@$(BIN)/python -m tests.mutants $(ARGS)

readme: packages $(READY) ## Follow the README in a fresh clone, as a new user
	@$(BIN)/pytest --full tests/test_readme.py $(ARGS)

bench: packages $(READY) ## Measure speed and memory, compared with other libraries
	@$(BIN)/python -m benchmarks $(ARGS)

wheel: packages $(READY) ## Try the wheel without the lock file, at the lowest and newest versions (ARGS=--full)
	@test -x $(BIN)/uv || $(PIP) install uv
	@$(BIN)/python -m tests.install $(ARGS)

dist: packages $(READY) ## Build wheel and sdist into dist, and the SBOM of both with the image's packages
	@rm -rf dist build/sbom
	@$(BIN)/python -m build --no-isolation >/dev/null
	@for name in tool contents; do '$(PYTHON)' -m venv --without-pip build/sbom/$$name; done
	@$(PIP) --python build/sbom/tool/bin/python install --require-hashes -r .github/sbom.lock
	@$(PIP) --python build/sbom/contents/bin/python install --require-hashes -r docker/pillarbox/requirements.lock
	@$(PIP) --python build/sbom/contents/bin/python install --no-deps dist/*.whl
	@build/sbom/tool/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	  --output-file build/sbom.cdx.json build/sbom/contents/bin/python
	@ls dist/* build/sbom.cdx.json

images: packages ## Build the images of docker/, without a registry if need be
	@docker/engine docker/build-images

containers: packages $(READY) ## Build the images and test what runs in containers
	@docker/engine sh -c 'docker/build-images && $(BIN)/pytest -m containers tests/containers $(ARGS) && \
	  $(BIN)/pytest -n $(WORKERS) $(PARTITION_TESTS)'

matrix: packages ## Run the tests on each supported Debian and PostgreSQL, as root
	@docker/matrix $(ARGS)

servers: packages $(READY) ## Run suites and faults on old and new servers, as root (ARGS=--help)
	@test -x $(BIN)/uv || $(PIP) install uv
	@$(BIN)/python -m tests.matrix $(ARGS)

check: packages $(READY) ## Check format, lint, types, imports, workflows and packaging
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/basedpyright --warnings
	$(BIN)/lint-imports
	$(BIN)/zizmor --offline --quiet .github
	$(BIN)/pytest -q tests/test_packaging.py tests/test_layout.py

format: packages $(READY) ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: packages $(READY) ## Write docs/reference and the Grafana board from code and database
	@$(BIN)/python -m docs.reference

screenshots: packages $(READY) ## Make the pictures of docs/web.md from a seeded database
	@$(BIN)/python -m docs.screenshots

site: packages $(READY) ## Build the documentation, into build/site (ARGS="-b linkcheck": its links)
	@$(BIN)/python -m sphinx -W --keep-going -q -j auto -d build/doctrees $(ARGS) docs build/site

lock: packages $(READY) ## Renew requirements.lock, the image's and the SBOM's (ARGS=--upgrade)
	@test -x $(BIN)/uv || $(PIP) install uv
	$(COMPILE) pyproject.toml --all-extras --group dev --group site $(ARGS) -o requirements.lock
	$(COMPILE) pyproject.toml $(IMAGE_EXTRAS:%=--extra %) --constraint requirements.lock \
	  -o docker/pillarbox/requirements.lock
	$(COMPILE) --group sbom --constraint requirements.lock $(ARGS) -o .github/sbom.lock

setup: packages jars $(READY) ## Install everything the other targets need, and nothing else

clean: ## Remove the virtual environment and everything that was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache \
	  .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

packages:
	@PYTHON='$(PYTHON)' docker/debian-packages $(needs)

jars:
	@tests/jars/fetch

$(READY): requirements.lock pyproject.toml | packages
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$('$(PYTHON)' -V 2>&1); pillarbox needs Python 3.11 or newer:" \
	    "make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo 'Setting up $(VENV): a minute the first time.'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || \
	  '$(PYTHON)' -m venv --clear $(VENV)
	@# Compiling everything would double the time; Python compiles modules when they are imported.
	@$(PIP) install --no-compile --require-hashes -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
