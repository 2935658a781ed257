# Every target does the set-up it needs, so any can be the first on a machine with Python 3.11 (or 3.10 and later), git and make.
#
#   make demo        train the handwritten digits (examples/digits.py), and say how to see simulated GPUs
#   make test        the test suite                 make test ARGS="tests/unit -k packaging"
#   make test-all    with the slow tests, which take some ten minutes more
#   make test-with   the fast tests with another Python or torch, all else the newest: PYTHON=3.12 TORCH=2.10
#                    ARGS='$(SAMPLE)' for one or two minutes of them; make with PYTHON=… only for the environment
#   make test-with-newest   the LightningModules and Keras networks of the tests with the newest lightning, keras and keras-hub on the index
#                    TORCH=2.13.0+cpu takes that very build of torch
#   make test-engines   DeepSpeed, Horovod, torch_tpu and Ray for real, each in an environment of its own (Horovod is compiled: half an hour)
#   make test-cluster   across two "hosts" (network namespaces: Linux, root)
#   make test-gpu    what needs an NVIDIA GPU, then benchmarks/gpu.py, with the torch that is there: PYTHON=python3
#   make test-simulated-gpu   what speaks to devices, on simulated GPUs (Linux, g++): ARGS=short for what CI runs, ARGS=all for all
#   make lint        ruff: rules and formatting     make typecheck   mypy, and pyright on what users write
#   make mutants     break the core's promises line by line: the tests named beside each must fail; ARGS="weighing" for some
#   make coverage    the tests of fitkit/training, and which of its branches they take
#   make bench       the benchmarks                 make bench ARGS="step arrays --quick"
#   make bench-peers other libraries for them, in an environment of their own
#   make soak        ranks killed at random moments, resources over many calls: ARGS="--kills 50 --share 1"
#   make docs        the site, in build/docs        make pictures    what README and benchmarks show, made anew
#   make release     sdist and wheel in dist/, checked
#   make setup       only the virtual environment   make clean       remove it and all that was built

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO  := $(VENV)/.installed-demo
PEERS := .venv-peers
ENGINES := .venv-engines
OTHER := .venv-with
UV    := $(OTHER)/uv/bin/uv
ARGS  ?=
# Three processes test side by side, a file each: on two cores one of them always waits for ranks. The files come in order, those
# with ranks first: few long tests at the end would leave the others idle. ARGS="-n 0" has one process, which a debugger needs.
SIDE_BY_SIDE := -n 3 --dist loadfile --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all with test-with test-with-newest test-cluster test-engines test-gpu test-simulated-gpu mutants coverage lint typecheck bench bench-peers soak docs pictures release clean

help:
	@sed -n '/^#   make/s/^#   //p' Makefile

setup: $(STAMP)

# OpenMP's threads spin while they wait for one another, and take the cores from each other where programs are more than cores:
# on two cores at loads of 6 to 10 the demo took 101 s of them, so 39.
demo test test-all test-with mutants coverage: export OMP_WAIT_POLICY ?= passive
# Tests start hundreds of processes; without bytecode files each compiles fitkit anew, 0.4 s.
demo test test-all test-with mutants coverage: export PYTHONDONTWRITEBYTECODE :=

demo: $(DEMO)
	@$(BIN)/python examples/digits.py $(ARGS)
	@$(BIN)/python tests/simulated_gpu/demo.py

test: $(STAMP)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

test-all: $(STAMP)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

# One minute of the fast tests, some of every package: .ci/run has them on the oldest and the newest Python and torch.
SAMPLE := $(addprefix tests/distributed/, test_fsdp_parts.py test_several_optimizers.py) \
    $(addprefix tests/unit/, \
    extras/jit/test_compiled_pass.py training/test_against_plain_torch.py training/test_on_batch.py training/test_resume_exactly.py \
    checkpoint/test_state.py checkpoint/test_foreign.py data/test_sources.py data/test_loaders.py \
    losses/test_names.py metrics/test_classification_values.py extras/test_rate_callbacks.py extras/test_averages.py \
    extras/loggers/test_loggers.py extras/pictures/test_html.py extras/export/test_export.py \
    distributed/test_resolve.py distributed/precision test_foundations.py test_typing.py)

# Made by uv, which needs a fifth of pip's time for torch's 6 GB, and finds Python 3.12 by its number or downloads it.
# Nothing is pinned but torch's minor release, where one is named; an environment for each pair.
$(UV):
	@$(firstword $(wildcard $(BIN)/python) python3) -m venv $(OTHER)/uv
	@$(OTHER)/uv/bin/python -m pip install -qq uv

with test-with: WITH = $(OTHER)/$(notdir $(or $(PYTHON),python3))-torch$(TORCH)
with: $(UV)
	@$(UV) venv --quiet --allow-existing --python $(or $(PYTHON),python3) $(WITH)
	@$(UV) pip install --quiet --upgrade --python $(WITH) "torch$(if $(TORCH),==$(TORCH).*)" -e ".[test]"

test-with: with
	@$(WITH)/bin/python -c 'import sys, torch; print("[test-with] Python", sys.version.split()[0], "torch", torch.__version__)'
	@$(WITH)/bin/python -m pytest $(SIDE_BY_SIDE) -m "not slow" $(ARGS)

# What trains as in its own library, with that library as it is now. Nothing else of the test requirements comes along: what needs
# more is skipped.
NEWEST := $(OTHER)/newest
PEERS_TESTS := $(addprefix tests/unit/extras/test_, lightning_programs.py lightning_hooks.py lightning_nets.py \
    lightning_data.py lightning_files.py keras_nets.py keras_hub.py)
# keras-hub brings TensorFlow, which Keras would prefer.
test-with-newest: export KERAS_BACKEND := torch
test-with-newest: export TF_CPP_MIN_LOG_LEVEL := 3
test-with-newest: $(UV)
	@$(UV) venv --quiet --allow-existing --python $(or $(PYTHON),python3) $(NEWEST)
	@$(UV) pip install --quiet --upgrade --python $(NEWEST) "torch$(if $(TORCH),==$(TORCH))" lightning keras keras-hub pytest pytest-timeout pytest-xdist -e .
	@$(NEWEST)/bin/python -c 'from importlib.metadata import version as v; print("[test-with-newest]", *(f"{n} {v(n)}" for n in ("lightning", "keras", "keras-hub", "torch")))'
	@$(NEWEST)/bin/python -m pytest $(SIDE_BY_SIDE) $(PEERS_TESTS) $(ARGS)

coverage: $(STAMP)
	@$(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not slow" --cov=fitkit/training --cov-branch --cov-report=term-missing:skip-covered tests/unit/training $(ARGS)

mutants: $(STAMP)
	@$(BIN)/python -m tests.mutants $(ARGS)

test-cluster: $(STAMP)
	@$(BIN)/python -m pytest tests/cluster $(ARGS)

# No environment is made: the machine's own torch knows its GPU. pytest's plugins may be missing there, so its settings stay out.
test-gpu:
	@$(or $(PYTHON),python3) -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider tests/gpu
	@$(or $(PYTHON),python3) -m benchmarks.gpu $(ARGS)

# Each kind of device in a run of its own: the GPU tests and the matrix on CUDA's rules, the matrix on types of other names.
SIMULATED := tests/simulated_gpu/run.py
ON_GPU = $(BIN)/python $(SIMULATED) --kind $(1) --minutes 40 -- -m pytest -q -p plugin -n 2 --dist load
test-simulated-gpu: $(STAMP)
ifeq ($(ARGS),short)
	@$(call ON_GPU,cuda) tests/simulated_gpu tests/gpu --ignore tests/gpu/test_no_waiting.py
else
	@$(call ON_GPU,cuda) tests/simulated_gpu tests/gpu
	@$(call ON_GPU,npu) tests/simulated_gpu/test_matrix.py
	@$(call ON_GPU,mps) tests/simulated_gpu/test_matrix.py
endif
ifeq ($(ARGS),all)
	@$(call ON_GPU,cuda) tests/docs/test_snippets.py
	@SIM_TESTS=1 $(call ON_GPU,cuda) -m "not slow" $(addprefix tests/unit/, training data metrics callbacks checkpoint distributed/precision)
	@SIM_TESTS=ranks $(call ON_GPU,cuda) -m "not slow" tests/distributed
	@$(BIN)/python tests/simulated_gpu/mutants.py
endif

test-engines: $(STAMP)
	@sh tests/engines/run.sh $(ENGINES) $(BIN)/python $(ARGS)

lint: $(STAMP)
	@$(BIN)/python -m ruff check .
	@$(BIN)/python -m ruff format --check --quiet fitkit examples benchmarks docs/*.py setup.py

typecheck: $(STAMP)
	@$(BIN)/python -m mypy $(ARGS)
	@$(BIN)/python -m pytest -q -n 0 tests/typing

bench: $(STAMP)
	@$(BIN)/python -m benchmarks $(ARGS)

# Never beside fitkit's own requirements: what the libraries ask for differs, and torch must be the same in both.
bench-peers: $(STAMP)
	@test -x $(PEERS)/bin/python || $(BIN)/python -m venv $(PEERS)
	@$(PEERS)/bin/python -m pip install -qq -c requirements/constraints.txt -r requirements/peers.txt
	@echo "[bench-peers] done; make bench finds them in $(PEERS)"

soak: $(STAMP)
	@$(BIN)/python -m benchmarks.soak $(ARGS)

docs: $(STAMP)
	@$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs $(ARGS)
	@echo "[docs] build/docs/index.html"

pictures: $(STAMP)
	@$(BIN)/python docs/readme_figures.py
	@$(BIN)/python docs/make_charts.py
	@$(BIN)/python docs/make_foreign_names.py
	@$(BIN)/python docs/make_codes.py
	@$(BIN)/python docs/make_pictures.py $(ARGS)

release: $(STAMP)
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist .
	@$(BIN)/python -m twine check --strict dist/*
	@ls -l dist

clean:
	rm -rf $(VENV) $(PEERS) $(ENGINES) $(OTHER) build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Two steps, so that `make demo` needn't wait for what only tests, documentation and releases need: $(DEMO), then $(STAMP).
# Each is written last, so an interrupted installation starts over, and holds the checkout's path: a virtual environment that
# was copied or moved along with its checkout still imports the fitkit of the old place.
ifneq ($(shell cat $(DEMO) 2>/dev/null),$(CURDIR))
.PHONY: $(DEMO)
endif
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

INSTALL := $(BIN)/python -m pip install -qq -c requirements/constraints.txt

# Linux has torch with CUDA from PyPI, of no use without NVIDIA's driver; who has told pip where to look knows.
define CPU_BUILD
[setup] no NVIDIA driver here: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make $(MAKECMDGOALS) takes PyTorch's CPU build, 1.4 GB instead of 5.7
endef

# A candidate is asked to run, because a name on the PATH may be a version manager's empty shim.
# --no-compile, here and below: the demo imports a twentieth of the files; compiling them all takes 30 s of a core.
$(DEMO): setup.cfg setup.py pyproject.toml requirements/constraints.txt
	@set -e; \
	if ! grep -qxF "$(CURDIR)" $(DEMO) $(STAMP) 2>/dev/null || ! $(BIN)/python -c pass 2>/dev/null; then \
	    rm -f $(DEMO) $(STAMP); \
	    python=; \
	    for candidate in $(PYTHON) python3.11 python3 python3.12 python3.13 python3.14 python3.10; do \
	        if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then \
	            python=$$candidate; break; \
	        fi; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "fitkit needs Python 3.10 or later (CI runs 3.11); found: $$(python3 --version 2>/dev/null || echo none)." >&2; \
	        echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; \
	        exit 1; \
	    fi; \
	    echo "[setup 1/2] virtual environment in $(VENV) ($$($$python --version))"; \
	    if ! $$python -m venv --clear $(VENV); then \
	        echo "$$python has no working venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; \
	        exit 1; \
	    fi; \
	    if [ "$$(uname)" = Linux ] && [ ! -e /proc/driver/nvidia/version ] && [ ! -e /dev/dxg ] \
	        && [ -z "$$PIP_EXTRA_INDEX_URL$$PIP_INDEX_URL$$PIP_FIND_LINKS" ]; then \
	        echo "$(CPU_BUILD)"; \
	    fi; \
	fi; \
	echo "[setup 2/2] PyTorch, fitkit and what the demo needs: one to a few minutes"; \
	rm -f $(DEMO) $(STAMP); \
	$(INSTALL) --no-compile -e ".[plot,sklearn]"; \
	printf '%s\n' "$(CURDIR)" > $(DEMO); \
	echo "[setup] done; later calls skip this"

# aeon is there for a data file that an example reads; what it requires itself doesn't go with the pinned numpy and pandas.
# keras-hub's networks need nothing of what it requires beside Keras: TensorFlow is for its texts.
$(STAMP): $(DEMO)
	@set -e; \
	rm -f $@; \
	echo "[setup] what tests, documentation and releases need: about a minute"; \
	$(INSTALL) --no-compile -e ".[dev]"; \
	$(INSTALL) --no-compile --no-deps aeon "keras-hub ; python_version >= '3.11'"; \
	printf '%s\n' "$(CURDIR)" > $@; \
	echo "[setup] done; later calls skip this"
