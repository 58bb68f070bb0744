# The two commands of the README are `make equivalence` and `make test`; both set the environment up first.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV ?= .venv
BIN := $(VENV)/bin
# One stamp per content of what is installed, so that a changed pin installs again.
STAMP := $(VENV)/.packproof-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
SIZE ?= tiny
ARGS ?=
PEERS ?=
VERSIONS ?= 0.17.1 0.18.2
JOB ?= examples/jobs/small-cpu.yaml

.PHONY: help
help: ## what there is
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@python="$$(.ci/find-python)" && echo "environment: $(VENV), made with $$python (the first time takes a few minutes)" && \
	  { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,lint]'
	@touch $@

.PHONY: setup
setup: $(STAMP) ## make the environment

.PHONY: equivalence
equivalence: $(STAMP) ## the main job: three witnesses, the packed sample and generated rows (SIZE=tiny|standard|long)
	$(BIN)/python -m equivalence run --size $(SIZE) $(ARGS)
	$(if $(WITNESSES),$(BIN)/python -m tools.witness compare $(WITNESSES))

.PHONY: witnesses
witnesses: $(STAMP) ## rows and training steps of other versions of Megatron-LM, added where absent (VERSIONS="0.17.1 0.18.2")
	@set -e; for version in $(VERSIONS); do \
	  $(BIN)/python -m tools.witness list | grep "^megatron_lm@$$version " >/dev/null || $(BIN)/python -m tools.witness add "megatron-core==$$version"; \
	done
	$(BIN)/python -m tools.witness compare $(VERSIONS) $(ARGS)

.PHONY: conformance
conformance: $(STAMP) ## the levels that other projects' packing reaches, each in its own environment (PEERS="verl trl", ARGS=--record)
	$(BIN)/python -m tools.peers $(PEERS) $(ARGS)

.PHONY: test
test: $(STAMP) ## the tests
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --durations=10 $(ARGS)

.PHONY: coverage
coverage: $(STAMP) ## the tests with coverage, which costs a third more time
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --cov --cov-report=term:skip-covered $(ARGS)

.PHONY: train
train: $(STAMP) ## train a small model on the packed sample: two ranks on the CPU, minutes (ARGS="sft.max_num_steps=10 …")
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m production.training --config examples/jobs/small-cpu.yaml $(ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff, the type checker, the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: docs
docs: $(STAMP) ## the documentation as a site in site/, links and anchors checked
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet $(ARGS)

.PHONY: check
check: $(STAMP) ## may a job start? its file, tokenizer and YAML against Megatron-LM (JOB=job.yaml ARGS="key=value --budget 10m …")
	$(BIN)/python -m tools.check $(JOB) $(ARGS)

.PHONY: bench
bench: $(STAMP) ## the benchmark of docs/benchmarks.md
	$(BIN)/python -m tools.bench rows $(ARGS)

.PHONY: fuzz
fuzz: $(STAMP) ## damaged inputs for the readers of files and manifests, from where the last run ended (ARGS="--count 1000000 --seed 1")
	$(BIN)/python -m tools.fuzz $(ARGS)

.PHONY: clean
clean: ## remove what was built, not the environment
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage*
