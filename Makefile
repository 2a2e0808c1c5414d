# `make run` and `make test` need python3 (3.11 or newer), make and a package registry, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PROTOS := $(wildcard proto/duplane/fabric/v1/*.proto)
# The contract that others rely on. After a break that is meant, and told in the CHANGELOG:
# buf build --exclude-source-info -o proto/contract.binpb
CONTRACT := proto/contract.binpb
GOLDEN ?= tests/golden/public
ARGS ?=
MINUTES ?= 1

.PHONY: run test check fmt lint types proto protocols golden fuzz bench clean

run: $(INSTALLED) ## set up and start everything on one machine
	@exec $(BIN)/duplane up $(ARGS)

test: $(INSTALLED) ## set up and run the tests
	$(BIN)/pytest -q $(ARGS)

check: lint types test ## what CI runs

fmt: $(INSTALLED) ## format the code and the protos
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

lint: $(INSTALLED) ## check style and the contract
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

protocols: $(INSTALLED) ## write down what the edge speaks
	$(BIN)/duplane protocols > edge/PROTOCOLS.md

golden: $(INSTALLED) ## replay the recorded traces through the model
	$(BIN)/duplane checkpoint replay $(GOLDEN)

fuzz: $(INSTALLED) ## mutated messages against the edge: MINUTES=5 SEED=...
	PYTHONPATH=tests $(BIN)/python -m fuzz --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

bench: $(INSTALLED) ## measure the hot paths
	$(BIN)/duplane bench codec
	$(BIN)/duplane bench fabric $(ARGS)

clean: ## forget the virtual environment
	rm -rf $(VENV)

# PIP_CONSTRAINT rather than -c: it holds for the build back end too.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "python3 is older than 3.11; set PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(BIN)/python -m pip install --quiet -e '.[worker,dev]'
	@touch $@
