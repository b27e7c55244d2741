# make demo      a GLA language model on real text, unsplit and split over ranks; sets everything up
# make check     ruff, types and the quick tests: the inner loop
# make test      the whole CPU suite, ruff, types and the documentation
# make test-gpu  the same cases and more on the GPUs of this machine; writes tests/gpu/last_run.json; GO_ON=--go-on: only
#                what has not passed since the last change, as after a run that was cut; GPUS=2: each test has two of
#                them, and more tests run at once
# make test-network  put links over UCX and TCP on this machine: on CPU ranks, and on two GPUs by NVSHMEM
# make test-triton   the GPU tests that show the kernels right with another Triton: TRITON=its folder; and times of both
# make peer      flash-linear-attention's own tests with the operators split over ranks: PEER=its checkout; with GPUs
# make matrix    the quick tests with other versions of torch, Triton, Python, transformers and NVSHMEM, on CPUs
# make bench     what this machine can hold
# make docs      the documentation into site/, its tables and API pages written, its examples run
# make venv      the environment alone
#
# OPTIONS: of pytest, for check, test and peer, as -x, -k kda or --junitxml=results.xml; --ranks N of peer.
# With PYTHON=python3, say, they run with that interpreter and what it has, and no environment is made. test-gpu and peer
# take python3 by themselves where that has all it needs, else an environment with CUDA's packages.

VENV := .venv
# of test-gpu at once: each has ranks of its own on every GPU, of about 3 GB each, beside two tests that take many more
# (tests/support/gpu_schedule.py), and takes nearly three cores while it compiles
JOBS = $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | awk -v cores=$$(nproc) -v each=$(GPUS) 'NR == 1 {n = int($$1 / 8000)} END {n *= each ? int(NR / each) : 1; m = int(cores * 3 / 8); n = n < m ? n : m; print (n > 0 ? n : 1)}')
FEW_JOBS = $(shell echo $$(($(JOBS) > 2 ? 2 : $(JOBS))))
# of test at once: one more than there are cores, which ranks that wait for one another leave free
WORKERS = $(shell n=$$(nproc); echo $$(($$n < 8 ? $$n + 1 : 8)))
ifdef PYTHON
  GIVEN := $(PYTHON)
  READY :=
else
  PYTHON := $(VENV)/bin/python
  READY := $(VENV)/ready
endif

# a bare checkout needs no installation, nor do the processes that are started from here
export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))

.PHONY: venv demo check test test-gpu test-network test-triton peer on-gpu network-on-gpu triton-on-gpu peer-on-gpu matrix bench docs clean

venv: $(VENV)/ready

# Triton 3.6, whose registers the tests count, is last: torch's wheel for CUDA asks for a later one.
# Megatron-core's wheels ask for Python 3.12; what is tested of it runs on earlier ones, too (without it: tests skipped)
$(VENV)/ready: setup.py
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install -q --upgrade 'setuptools>=64' wheel
	$(VENV)/bin/python -m pip install -q 'torch==2.13.0'
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e '.[test,bench]'
	$(VENV)/bin/python -m pip install -q --no-deps 'triton==3.6.0'
	-$(VENV)/bin/python -m pip install -q --no-deps --only-binary :all: --python-version 3.12 --ignore-requires-python \
	  megatron-core==0.19.2 --target "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	touch $@

demo: $(READY)
	$(PYTHON) examples/train_text.py

check: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -n 2 --dist worksteal -m quick $(OPTIONS)

test: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(OPTIONS)

HAS_ALL := import pytest, xdist, torch, nvshmem.bindings; assert torch.cuda.is_available()
test-gpu: GOAL := on-gpu
test-triton: GOAL := triton-on-gpu
peer: GOAL := peer-on-gpu
test-gpu test-triton peer:
ifdef GIVEN
	@$(MAKE) --no-print-directory $(GOAL) PYTHON=$(GIVEN)
else
	@if python3 -c '$(HAS_ALL)' 2>/dev/null; then $(MAKE) --no-print-directory $(GOAL) PYTHON=python3; \
	else $(MAKE) --no-print-directory $(VENV)/ready-gpu $(GOAL) PYTHON=$(VENV)/bin/python; fi
endif

peer-on-gpu:
	@test -d "$(PEER)/tests/ops" || { echo 'make peer PEER=/path/to/flash-linear-attention, a checkout'; exit 2; }
	PYTHONPATH=$(CURDIR)/tests:$(PYTHONPATH) $(PYTHON) -m support.peer "$(PEER)" $(OPTIONS)

OTHER := PYTHONPATH=$(TRITON):$(PYTHONPATH) $(PYTHON)
triton-on-gpu:
	@test -d "$(TRITON)/triton" || { echo 'make test-triton TRITON=/folder, of pip install --no-deps --target /folder triton==3.9.0'; exit 2; }
	$(OTHER) -m pytest --gpu -m kernels -n $(JOBS) $(OPTIONS)
	mkdir -p build
	$(PYTHON) -m bench.versions --no-fla --json build/usual.json
	$(OTHER) -m bench.versions --no-fla --json build/other.json
	$(PYTHON) -m bench.versions --compare build/usual.json build/other.json

# First, many at once with ranks of their own on the same GPUs, all but what others would disturb; then what has failed
# among them, as where memory ran out; then the others. GO_ON=--go-on: only what has not passed since the last change
on-gpu:
	$(PYTHON) -m pytest --gpu -m 'not alone' -n $(JOBS) $(addprefix --gpus=,$(GPUS)) $(GO_ON); first=$$?; \
	if test $$first = 1; then $(PYTHON) -m pytest --gpu -m 'not alone' -n $(FEW_JOBS) $(addprefix --gpus=,$(GPUS)) --go-on; first=$$?; fi; \
	$(PYTHON) -m pytest --gpu -m alone $(addprefix --gpus=,$(GPUS)) $(GO_ON) && exit $$first

# Without GPUs, what runs on CPU ranks
test-network:
ifdef GIVEN
	$(GIVEN) -m pytest --network $(OPTIONS)
else
	@if python3 -c '$(HAS_ALL); import libucx' 2>/dev/null; then python3 -m pytest --network $(OPTIONS); \
	else $(MAKE) --no-print-directory $(VENV)/$(if $(shell command -v nvidia-smi),ready-gpu,ready-network) && \
	$(VENV)/bin/python -m pytest --network $(OPTIONS); fi
endif

$(VENV)/ready-gpu: $(VENV)/ready
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e '.[cuda13,network]'
	touch $@

$(VENV)/ready-network: $(VENV)/ready
	$(VENV)/bin/python -m pip install -q --no-build-isolation -e '.[network]'
	touch $@

# One environment at a time, removed afterwards; ONLY: one of those that `nox -f tests/matrix/noxfile.py -l` lists
matrix: $(READY)
	PYENV_VERSION=$$(pyenv versions --bare 2>/dev/null | paste -sd:) $(PYTHON) -m nox -f tests/matrix/noxfile.py $(if $(ONLY),-s $(ONLY))

bench: $(READY)
	$(PYTHON) -m bench.scan
	$(PYTHON) -m bench.transitions
	$(PYTHON) -m bench.operator
	$(PYTHON) -m bench.scaling
	$(PYTHON) -m bench.plots

docs: $(READY)
	$(PYTHON) docs/generate.py
	$(PYTHON) -m mkdocs build --strict
	$(PYTHON) docs/check_examples.py

clean:
	rm -rf $(VENV) build site *.egg-info demo.png demo.csv
