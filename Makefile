# make demo      a GLA language model on real text, unsplit and split over ranks; sets everything up
# make check     ruff, types and the quick tests: the inner loop
# make test      the CPU suite without the cases marked slow, ruff, types and the documentation: 15 minutes on 2 cores
# make test-all  the whole CPU suite
# make test-gpu  the same cases and more on this machine's GPUs; writes tests/gpu/last_run.json. GO_ON=--go-on: only
#                tests that have not passed since the last change, e.g. after an interrupted run. GPUS=2: each test uses
#                two of the GPUs, and more tests run at once
# make test-network  put links over UCX and TCP on this machine: on CPU ranks, and on two GPUs by NVSHMEM
# make test-triton   the GPU tests of the kernels' results with another Triton (TRITON=its folder), and times of both
# make peer      flash-linear-attention's own tests with the operators split over ranks: PEER=its checkout; with GPUs
# make matrix    the quick tests with other versions of torch, Triton, Python, transformers and NVSHMEM, on CPUs
# make bench     benchmarks that fit this machine, and plots
# make docs      build the documentation into site/: write tables and API pages, run examples
# make venv      the environment only
#
# OPTIONS: pytest's options for check, test, test-all, peer, e.g. -x, -k kda or --junitxml=results.xml; for peer also
# --ranks N.
# PYTHON=python3, for example, uses that interpreter and its packages, and creates no environment. test-gpu and peer use
# python3 if it has all required packages, else an environment with CUDA's packages.

VENV := .venv
# Jobs of test-gpu at once: each has its own ranks on every GPU, about 3 GB each, plus two tests that take much
# more (tests/support/gpu_schedule.py), and uses nearly three cores during compilation
JOBS = $(shell nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | awk -v cores=$$(nproc) -v each=$(GPUS) 'NR == 1 {n = int($$1 / 8000)} END {n *= each ? int(NR / each) : 1; m = int(cores * 3 / 8); n = n < m ? n : m; print (n > 0 ? n : 1)}')
FEW_JOBS = $(shell echo $$(($(JOBS) > 2 ? 2 : $(JOBS))))
# Workers of test: one more than cores, since waiting ranks leave cores idle
WORKERS = $(shell n=$$(nproc); echo $$(($$n < 8 ? $$n + 1 : 8)))
ifdef PYTHON
  GIVEN := $(PYTHON)
  READY :=
else
  PYTHON := $(VENV)/bin/python
  READY := $(VENV)/ready
endif

# A checkout needs no installation, and neither do the processes started from here
export PYTHONPATH := $(CURDIR)$(addprefix :,$(PYTHONPATH))
# Hundreds of processes import the package and must keep its bytecode
export PYTHONDONTWRITEBYTECODE :=

.PHONY: venv demo check test test-all test-gpu test-network test-triton peer on-gpu network-on-gpu triton-on-gpu peer-on-gpu matrix bench docs clean

venv: $(VENV)/ready

# Triton 3.6, for which the tests count registers, is installed last: torch's wheel for CUDA requires a later one. It is
# also installed before the package if torch has no Triton (the wheel for CPUs): otherwise pip would fetch the latest.
# Megatron-core's wheels require Python 3.12; its tested parts also run on earlier ones (without it tests are skipped).
# TRL, with pyarrow and pandas, is large, and requires Python 3.11; without it its tests are skipped.
# ringmaster is small; without it its tests are skipped, too.
# Of mamba_ssm, a test calls the Triton kernels: it is built without its CUDA extension, in seconds.
# compileall writes bytecode on all cores, pip on one; the bytecode of transformers' many models is written on import
PIP = $(VENV)/bin/python -m pip install -q --no-compile
$(VENV)/ready: pyproject.toml
	python3 -m venv $(VENV)
	$(PIP) --upgrade 'setuptools>=77.0.3' wheel 'torch==2.13.0'
	$(VENV)/bin/python -c 'import triton' 2>/dev/null || $(PIP) --no-deps 'triton==3.6.0'
	$(PIP) --no-build-isolation -e '.[test,bench]'
	$(PIP) --no-deps 'triton==3.6.0'
	-$(PIP) --no-deps --only-binary :all: --python-version 3.12 --ignore-requires-python \
	  megatron-core==0.19.2 --target "$$($(VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	-$(PIP) trl==1.16.0
	-$(PIP) --no-deps axolotl-ringmaster==0.2.7
	-MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE $(PIP) --no-deps --no-build-isolation mamba-ssm==2.3.2.post1
	-$(VENV)/bin/python -m compileall -qq -j 0 -x '/transformers/models/' $(VENV)/lib
	touch $@

demo: $(READY)
	$(PYTHON) examples/train_text.py

check: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -n 2 --dist worksteal -m quick $(OPTIONS)

test-all: ALL := --all
test-all: test

test: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ALL) $(OPTIONS)

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

# First all tests that tolerate others on the same GPUs, many at once, each with its own ranks; then those that failed,
# e.g. out of memory, with fewer at once; then the tests marked alone. GO_ON=--go-on: only tests that have not passed
# since the last change
on-gpu:
	$(PYTHON) -m pytest --gpu -m 'not alone' -n $(JOBS) $(addprefix --gpus=,$(GPUS)) $(GO_ON); first=$$?; \
	if test $$first = 1; then $(PYTHON) -m pytest --gpu -m 'not alone' -n $(FEW_JOBS) $(addprefix --gpus=,$(GPUS)) --go-on; first=$$?; fi; \
	$(PYTHON) -m pytest --gpu -m alone $(addprefix --gpus=,$(GPUS)) $(GO_ON) && exit $$first

# Without GPUs, the part on CPU ranks
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

# One environment at a time, removed afterwards. ONLY: a session that `nox -f tests/matrix/noxfile.py -l` lists
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
	rm -rf $(VENV) build dist site *.egg-info demo.png demo.csv
