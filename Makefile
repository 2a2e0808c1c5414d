# Needs python3 (3.11 or newer), make and a package registry, nothing else. Start with `make help`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Installed: what runs; and what tests and checks need beside it.
RUNNABLE := $(VENV)/.runnable
INSTALLED := $(VENV)/.installed
# Clients of other projects, apart from the packages of this project, with their own versions.
CLIENTS := .clients/.installed
NODE_CLIENTS := tests/clients/node_modules/.installed
# Programs that check what is not code: images, workflows, packages; with their own versions.
CHECKS := .checks/.installed
# What renders and checks the Helm chart.
CHART_TOOLS := .clients-chart/.installed
PROTOS := $(wildcard proto/duplane/fabric/v1/*.proto)
# Messages without services, private to the scheduler.
SCHEDULER_PROTOS := $(shell find scheduler -name '*.proto')
# The contract that clients rely on. After an intended break, which the CHANGELOG must name:
# buf build --exclude-source-info -o proto/contract.binpb
CONTRACT := proto/contract.binpb
GOLDEN ?= tests/golden/public
ARGS ?=
MINUTES ?= 1
SEEDS ?= 1000
SECONDS ?= 600
# Processes that run tests: more than the cores of a small machine, because many tests wait.
WORKERS ?= 5
# Build of torch: cpu or cuda (see tools/install.py).
TORCH ?= cpu

# Tests start hundreds of processes. Each would compile all modules again if this variable were set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help run setup clients unit test cluster-test check coverage fmt lint types proto contract-docs protocols \
	settings metrics locks golden fuzz simulate chaos drills bench delta-path train evaluate fetch \
	hearing checks licences sbom clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(RUNNABLE) ## set up and start everything on one machine: ARGS="--port 8080" TORCH=cuda
	@exec $(BIN)/duplane up $(ARGS)

setup: $(INSTALLED) ## set up only, for tests and checks too: TORCH=cuda installs torch with CUDA

clients: $(CLIENTS) $(NODE_CLIENTS) $(CHART_TOOLS) ## install what the tests run of other projects, apart from .venv

unit: $(INSTALLED) ## run the fast tests: no processes, no recorded traces
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto -m "not slow" tests/unit tests/contract $(ARGS)

test: $(INSTALLED) ## run all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -rfEs -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--slowest-files 10 --ignore tests/cluster $(ARGS)

cluster-test: $(INSTALLED) ## run a fabric on several hosts (network namespaces, as root) and break it
	$(BIN)/pytest -q tests/cluster $(ARGS)

check: lint types test cluster-test ## run everything that CI runs

coverage: $(INSTALLED) ## run all tests and print the share of lines that they run
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q --ignore tests/cluster $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --skip-empty | tail -40

fmt: $(INSTALLED) ## format the code and the protos
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

lint: $(INSTALLED) ## check style, and the contract against its last release
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against $(CONTRACT)

types: $(INSTALLED) ## check types
	$(BIN)/pyright --pythonpath $(BIN)/python

proto: $(INSTALLED) ## generate the stubs from the protos
	PATH="$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto \
		--grpc_python_out=proto --mypy_grpc_out=quiet:proto $(PROTOS)
	$(BIN)/python -m grpc_tools.protoc -Iproto -Ischeduler --python_out=scheduler \
		--pyi_out=scheduler $(SCHEDULER_PROTOS)

contract-docs: $(INSTALLED) ## write the reference of the gRPC contract to proto/CONTRACT.md
	$(BIN)/python -m pages.contract > proto/CONTRACT.md

protocols: $(INSTALLED) ## write the client protocols to edge/PROTOCOLS.md
	$(BIN)/python -m pages.protocols > edge/PROTOCOLS.md

settings: $(INSTALLED) ## write the settings of all processes to docs/settings.md
	$(BIN)/python -m pages.settings > docs/settings.md

metrics: $(INSTALLED) ## write the list of all metrics to docs/metrics.md
	$(BIN)/python -m pages.metrics > docs/metrics.md

locks: $(CHECKS) $(INSTALLED) ## write deploy/locks: all packages of the images with their hashes
	$(BIN)/python -m supply.locks --uv .checks/bin/uv $(ARGS)

checks: $(CHECKS) ## install the programs that check images and workflows, apart from .venv

licences: $(INSTALLED) ## check the licences of all packages; images build av from source
	$(BIN)/python -m supply.licences --except av

sbom: $(CHECKS) $(INSTALLED) ## write an SBOM (CycloneDX) of each image to dist
	$(BIN)/python -m supply.sbom dist --cyclonedx .checks/bin/cyclonedx-py

golden: $(INSTALLED) ## replay the recorded traces through the model: GOLDEN=DIRECTORY
	$(BIN)/duplane checkpoint replay $(GOLDEN)

fuzz: $(INSTALLED) ## send mutated messages to the edge: MINUTES=5 SEED=1
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

simulate: $(INSTALLED) ## simulate scheduler, workers and callers with faults: SEEDS=1000, or SEED=7
	PYTHONPATH=tests $(BIN)/python -m simulation $(if $(SEED),--seed $(SEED),--seeds $(SEEDS))

chaos: $(INSTALLED) ## kill and freeze real processes under calls, count every unit: SECONDS=600 SEED=1
	PYTHONPATH=tests $(BIN)/python -m chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

drills: $(INSTALLED) ## cause each fault of docs/runbook.md and follow its page: ARGS=worker-offline
	PYTHONPATH=tests $(BIN)/python -m drills $(ARGS)

delta-path: $(INSTALLED) ## list the functions of the edge that a speaking delta passes
	PYTHONPATH=tests $(BIN)/python -m support.edge.delta_path

bench: $(INSTALLED) ## measure the hot paths
	$(BIN)/duplane bench codec
	$(BIN)/duplane bench fabric $(ARGS)

train: $(INSTALLED) ## train the default model: ARGS="DIR --processes 2" (see tools/training)
	$(BIN)/python -m training train $(ARGS)

evaluate: $(INSTALLED) ## measure the default model: ARGS=DIR
	$(BIN)/python -m training evaluate $(ARGS)

fetch: $(INSTALLED) ## fetch the voices and recordings for `make hearing`
	$(BIN)/python -m training fetch $(ARGS)

hearing: $(INSTALLED) ## measure whom a model hears: ARGS="DIR --recordings DIR" (see tools/training)
	$(BIN)/python -m training hearing $(ARGS)

clean: ## delete the virtual environment
	rm -rf $(VENV)

$(CLIENTS): tests/clients/requirements.txt
$(CHART_TOOLS): tests/clients/chart-requirements.txt
$(CLIENTS) $(CHART_TOOLS):
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

$(NODE_CLIENTS): tests/clients/package-lock.json
	npm ci --prefix tests/clients --no-audit --no-fund
	@touch $@

$(CHECKS): deploy/locks/checks.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --require-hashes --requirement $<
	@touch $@

$(INSTALLED): pyproject.toml constraints.txt tools/install.py
	@TORCH=$(TORCH) $(PYTHON) tools/install.py --dev $(VENV)
	@touch $(RUNNABLE) $@

$(RUNNABLE): pyproject.toml constraints.txt tools/install.py
	@TORCH=$(TORCH) $(PYTHON) tools/install.py $(VENV)
	@touch $@
