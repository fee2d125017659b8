# `make demo` measures this machine, and `make test` runs the tests. Both install the environment
# first. Variables:
#
#   PYTHON      interpreter that makes the environment (3.11 or newer)
#   GPU         vulkan, cuda or rocm: compiles llama.cpp for a GPU too, in an environment of its own
#               (.venv-vulkan); `crossover doctor` says which packages it needs
#   VENV        folder of the environment
#   PIP_FLAGS   extra flags for pip. On a machine without a GPU, PyTorch's CPU index saves several
#               gigabytes: PIP_FLAGS="--extra-index-url URL"
#   IMAGE_BASE  base of `make images`, for example docker.io/library/debian:12-slim where an image
#               registry can be reached

SHELL = /bin/bash
PYTHON ?= python3
GPU =
VENV ?= .venv$(GPU:%=-%)
SCALE_VENV ?= .venv-scale
VULKAN_VENV ?= .venv-vulkan
LOWEST_VENV ?= .venv-lowest
PIP_FLAGS ?=
RUNS ?= runs
TIMES = .pytest_cache/times.json
HEAVY_TIMES = .pytest_cache/times-heavy.json
HEAVY_LOG = .pytest_cache/heavy.log
TIMED = -p tests.time_per_file --times $(TIMES)
IMAGE_BASE ?= localhost/debian:12-slim
CMAKE_OF_vulkan = -DGGML_VULKAN=on
CMAKE_OF_cuda = -DGGML_CUDA=on
CMAKE_OF_rocm = -DGGML_HIP=on
GPU_CMAKE = $(if $(GPU),$(or $(CMAKE_OF_$(GPU)),$(error GPU is $(GPU); there are vulkan, cuda, rocm)))
# Only on an ARM CPU that the compiler does not know does the script print flags.
NATIVE_CMAKE = $$($(PYTHON) "$(CURDIR)/serving/backends/llama_cpp/native_flags.py")
LLAMA_CMAKE = -DLLAVA_BUILD=OFF $(NATIVE_CMAKE) $(GPU_CMAKE) $(CMAKE_ARGS)
LLAMA_BUILD = CXXFLAGS='-include "$(CURDIR)/docker/amx.h"'" $$CXXFLAGS" CMAKE_ARGS="$(LLAMA_CMAKE)"
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PACKAGES = models serving loadtests reports
.PHONY: links demo test test-slow test-lowest scale-test test-vulkan test-aarch64 soak llama clients lint env images image-base test-images lint-images docs release-check clean help

help:
	@echo "  make demo            measure this machine: campaign and report (8 minutes after installation)"
	@echo "  make demo GPU=vulkan the same with llama.cpp compiled for a GPU (also cuda, rocm)"
	@echo "  make test            run the tests, and print the time of each file (4 minutes on 2 fast cores, 12 on slow ones)"
	@echo "  make test-slow       run further cases of the same promises: architectures, formats, seeds"
	@echo "  make lint            run ruff, mypy and import-linter"
	@echo "  make docs            build the guides as a site, in site/"
	@echo "  make test-lowest     run the tests with the lowest package versions that pyproject.toml allows"
	@echo "  make scale-test      test replicas on a Ray cluster of this machine (installs 600 MB)"
	@echo "  make test-vulkan     test llama.cpp on Vulkan, on a GPU or Mesa's software device (compiles it)"
	@echo "  make clients         test the clients of docs/clients.md, GuideLLM, AIPerf and vllm bench serve"
	@echo "                       against this server (installs 5 GB)"
	@echo "  make soak            run a server under load for an hour, then kill processes of campaigns"
	@echo "  make test-aarch64    serve a model, run unit tests and a report on an emulated aarch64 (Debian 12, root)"
	@echo "  make images          build the images of docker/ with buildah (names missing Debian packages)"
	@echo "  make test-images     run those images with podman (names missing Debian packages)"
	@echo "  make lint-images     run hadolint and shellcheck, and check the schemas of docker/"
	@echo "  make release-check   install sdist and wheel without torch, then serve, load and report"

demo: $(STAMP)
	$(BIN)/crossover campaign run loadtests/demo.toml --out $(RUNS)
	$(BIN)/crossover report "$$(ls -td $(RUNS)/*/ | head -n 1)"

# The tests start hundreds of Python processes. Without bytecode on disk, each of them would compile
# all sources that it imports, and each worker all tests.
test test-slow test-lowest: export PYTHONDONTWRITEBYTECODE =

test: $(STAMP)
	@mkdir -p $(dir $(TIMES)) && rm -f $(TIMES) $(HEAVY_TIMES)
	@echo "== five at a time, since many of them wait; one of them has all files that import torch"
	@export OMP_NUM_THREADS=1; ordinary="not clock and not quiet_machine and not slow"; \
	$(BIN)/python -m pytest -p tests.time_per_file --times $(HEAVY_TIMES) --heavy only -m "$$ordinary" > $(HEAVY_LOG) 2>&1 & heavy=$$!; trap "kill $$heavy 2>/dev/null" EXIT; \
	$(BIN)/python -m pytest $(TIMED) --heavy without -n 4 --dist loadfile -m "$$ordinary"; status=$$?; \
	wait $$heavy; heavy_status=$$?; echo "== the files that import torch"; cat $(HEAVY_LOG); \
	exit $$(( status ? status : heavy_status ))
	@echo "== tests that measure times: three at a time, since they mostly wait, then one by one"
	$(BIN)/python -m pytest $(TIMED) -n 3 --dist loadfile -m clock $$(grep -rl "mark\.clock" tests --include="test_*.py")
	$(BIN)/python -m pytest $(TIMED) -m "quiet_machine and not slow" $$(grep -rl "mark\.quiet_machine" tests --include="test_*.py")
	@echo "== seconds per file"
	@$(BIN)/python -m tests.time_per_file $(TIMES) $(HEAVY_TIMES)

# Further cases of what `make test` tests: architectures of GGUF files, formats, seeds.
test-slow: $(STAMP)
	@export OMP_NUM_THREADS=1; set -x; \
	$(BIN)/python -m pytest -n 3 -m "slow and not quiet_machine" $$(grep -rl "mark\.slow" tests --include="test_*.py") && \
	$(BIN)/python -m pytest -m "slow and quiet_machine" $$(grep -rl "mark\.quiet_machine" tests --include="test_*.py")

# An hour and ten minutes, by hand: memory, descriptors and answers of a server, and kills.
soak: $(STAMP)
	$(BIN)/python -m tests.bench.pressure soak --seconds 3600 --rate 10
	$(BIN)/python -m tests.chaos --minutes 10

# Without constraints.txt: uv takes the lowest version that each requirement in pyproject.toml allows.
test-lowest:
	test -x $(LOWEST_VENV)/bin/uv || { $(PYTHON) -m venv $(LOWEST_VENV) && $(LOWEST_VENV)/bin/pip install --quiet uv; }
	$(LLAMA_BUILD) $(LOWEST_VENV)/bin/uv pip install --quiet --python $(LOWEST_VENV)/bin/python --resolution lowest-direct $(PIP_FLAGS) -e '.[dev]'
	OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/python -m pytest -n 3 --dist loadfile -m "not clock and not quiet_machine and not slow" -k "not are_dependencies_of_all_and_pinned"

scale-test:
	test -x $(SCALE_VENV)/bin/python || $(PYTHON) -m venv $(SCALE_VENV)
	$(SCALE_VENV)/bin/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[scale,load]' pytest pytest-timeout pytest-xdist
	$(SCALE_VENV)/bin/python -m pytest tests/scale -W ignore::ResourceWarning -W ignore::pytest.PytestUnraisableExceptionWarning

test-vulkan:
	@docker/vulkan-headers.sh .vulkan || { status=$$?; test $$status = 3 && echo "test-vulkan: not run" && exit 0; exit $$status; }; \
	set -e; test -x $(VULKAN_VENV)/bin/python || $(PYTHON) -m venv $(VULKAN_VENV); \
	$(VULKAN_VENV)/bin/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[load]' pytest pytest-timeout pytest-xdist; \
	$(MAKE) --no-print-directory llama GPU=vulkan VENV=$(VULKAN_VENV); \
	ls /dev/dri/renderD* /dev/nvidiactl 2>/dev/null | grep -q . || export GGML_VK_VISIBLE_DEVICES=$${GGML_VK_VISIBLE_DEVICES-0}; \
	$(VULKAN_VENV)/bin/python -m pytest -m vulkan tests/serving/backends/test_vulkan.py

test-aarch64: $(STAMP)
	@PYTHON=$(abspath $(BIN)/python) tests/aarch64/check.sh

clients: $(STAMP)
	tests/end_to_end/clients/install.sh
	CROSSOVER_CLIENTS=1 $(BIN)/python -m pytest tests/end_to_end/test_clients.py tests/end_to_end/test_agents.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m tests.house

images:
	@for tool in buildah podman runc $(if $(findstring localhost/,$(IMAGE_BASE)),mmdebstrap); do \
	  command -v $$tool >/dev/null || { echo "images: not built, this machine has no $$tool (Debian: apt-get install $$tool)"; exit 0; }; done; \
	set -e; export CONTAINERS_CONF=$(CURDIR)/docker/containers.conf BASE=$(IMAGE_BASE); \
	said=$$(podman info 2>&1 >/dev/null) || { echo "images: not built, podman does not work here: $$said"; exit 0; }; \
	$(MAKE) --no-print-directory image-base; \
	for name in cpu load report; do docker/build.sh $$name localhost/crossover:$$name; done; \
	docker/build.sh "" localhost/prometheus docker/prometheus/Dockerfile

# The image that the others are based on, where no registry of images can be reached.
image-base:
	@$(if $(findstring localhost/,$(IMAGE_BASE)),export CONTAINERS_CONF=$(CURDIR)/docker/containers.conf; podman image exists $(IMAGE_BASE) || docker/base.sh)

test-images:
	PYTHON=$(PYTHON) PIP_FLAGS="$(PIP_FLAGS)" VENV=$(VENV) docker/test-images.sh

lint-images:
	PYTHON=$(PYTHON) PIP_FLAGS="$(PIP_FLAGS)" VENV=$(VENV) docker/lint.sh

docs: $(STAMP)
	@$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[docs]'
	$(BIN)/python -m tests.docs_site

release-check:
	$(PYTHON) -m tests.release_check

# llama.cpp compiled for GPU, not from pip's cache, which may hold a wheel for other devices.
llama:
	@$(if $(filter vulkan,$(GPU)),docker/vulkan-headers.sh .vulkan)
	@echo "== llama.cpp for $(GPU) in $(VENV) (compiled the first time)"
	@if [[ -d .vulkan/usr ]]; then export CMAKE_PREFIX_PATH=$${CMAKE_PREFIX_PATH:-$(CURDIR)/.vulkan/usr}; fi; \
	$(LLAMA_BUILD) $(BIN)/pip install --quiet --no-cache-dir $(PIP_FLAGS) -c constraints.txt llama-cpp-python

env: $(STAMP)

# An sdist has no links, and zip files and git with core.symlinks=false have text files instead.
links:
	@for name in $(PACKAGES); do test -d crossover/$$name || ln -sf ../$$name crossover/; done

$(STAMP): pyproject.toml constraints.txt | links
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "crossover: needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.11")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "crossover: $(PYTHON) cannot make environments. Debian, Ubuntu:  apt-get install python3-venv"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "crossover: no C++ compiler found, and llama-cpp-python is built from source."; \
	  echo "  Debian, Ubuntu:  apt-get install build-essential"; \
	  echo "  Fedora:          dnf install gcc-c++ make"; \
	  echo "  Alpine:          apk add build-base"; exit 1; }
	@echo "== making the environment in $(VENV) (the first time, llama.cpp is compiled: some 4 minutes on 2 cores; pip keeps the wheel)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	@$(if $(GPU),$(MAKE) --no-print-directory llama GPU=$(GPU) VENV=$(VENV))
	@$(LLAMA_BUILD) $(BIN)/pip install --progress-bar off $(PIP_FLAGS) -c constraints.txt -e '.[dev]' 2>&1 \
	  | tee $(VENV)/install.log | sed -u -n -E 's/^(Collecting|Downloading) ([^ ]*).*/   \1 \2/p; /^ *Building wheel/p; /^ERROR/p'; \
	  test "$${PIPESTATUS[0]}" = 0 || { echo "crossover: the installation failed; the end of $(VENV)/install.log:"; tail -n 25 $(VENV)/install.log; exit 1; }
	@$(BIN)/python -c 'import llama_cpp, onnxruntime, torch, altair, crossover'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) $(LOWEST_VENV) .vulkan .mypy_cache .ruff_cache .pytest_cache
