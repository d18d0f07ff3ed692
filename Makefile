# One command each:
#   make               venv + install (always rebuilds what changed)
#   make demo          the same, then a MoE layer over 4 ranks        DEMO_ARGS="--preset tiny"
#   make test          the same, then all tests                       PYTEST_ARGS="-k dispatch"
#   make test-npu      the tests on the virtual NPU, with the torch_npu wheel beside the environment
#   make lint  format  ruff, mypy --strict, clang-format
#   make asan  tsan    the tests marked so under ASan and UBSan, or TSan, with controls that must fail
#   make mutants       broken kernels: one-line mutants found by the suite, the others by the checked twin
#   make soak          the fault and load tests with their full counts, and the counts printed: hours
#   make explore       schedules of the kernels on the checked twin       EXPLORE_ARGS="-n 100000"
#   make model         the protocol's model in spin, where it is there    MODEL_ARGS=--full
#   make bench         dispatch and combine against gloo, MPI and the machine's limit   BENCH_ARGS="--bs 32"
#   make bench-check   fails where the bounds of docs/performance.md are not kept
#   make lib           the libraries into the source tree, for PYTHONPATH=. without installing
#   make wheel  clean  headers-check CANN_HEADERS=dir  address-space-check

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_NPU ?= torch_npu==2.13.0
DEMO_ARGS ?=
PYTEST_ARGS ?=
EXPLORE_ARGS ?=
MODEL_ARGS ?=
BENCH_ARGS ?=

bin := $(abspath $(VENV))/bin
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests run from tests/ so that they import the installed package, never the source tree.
pytest = cd tests && ASCEND_MOE_TEST_INSTALLED=1 ASCEND_MOE_CACHE=$(CURDIR)/build/kernels $(sanitized) $(bin)/pytest --timeout=300

# torch comes first: the compiled kernels of its ops are built against the one in the venv. Then pip is asked for
# torch and for the project in one command, so that it never picks another torch. It always runs, no stamp file:
# outside pip's build isolation the build directory is kept, and only what changed is compiled. The first time it
# shows what it downloads, later it is quiet.
pip = $(bin)/python -m pip install $(if $(wildcard $(bin)/ascend-moe),--quiet)
torch = $(foreach word,$(TORCH),'$(word)')
pip_install = $(pip) $(torch) && $(pip) --no-build-isolation $(torch)

.NOTPARALLEL:
.DEFAULT_GOAL := install
.PHONY: install demo test test-npu lint format asan tsan mutants soak explore model bench bench-check lib wheel clean headers-check address-space-check

# The venv with the build backend, and cmake and ninja where the system has none.
$(bin)/scikit-build-core:
	test -x $(bin)/pip || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet scikit-build-core $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))

install: $(bin)/scikit-build-core
	$(pip_install) .[cli]

demo: install
	PYTHONSAFEPATH=1 $(bin)/ascend-moe run $(DEMO_ARGS)

test: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) -n 2 -m "not npu and not nightly" $(PYTEST_ARGS)

# The wheel lies in a folder of its own, so that torch starts without CANN everywhere else.
torch_npu := $(CURDIR)/build/npu/$(subst ==,-,$(TORCH_NPU))
$(torch_npu): $(bin)/scikit-build-core
	rm -rf $@.part
	$(bin)/python -m pip install --quiet --no-deps --target $@.part '$(TORCH_NPU)'
	mv $@.part $@

test-npu: $(bin)/scikit-build-core $(torch_npu)
	$(pip_install) .[test]
	export PYTHONPATH=$(torch_npu) TORCH_DEVICE_BACKEND_AUTOLOAD=0; $(pytest) -n 2 -m npu $(PYTEST_ARGS)

lint: $(bin)/scikit-build-core
	$(pip_install) .[dev]
	PATH="$(bin):$$PATH" tools/lint.sh

format: $(bin)/scikit-build-core
	$(pip_install) .[dev]
	PATH="$(bin):$$PATH" tools/lint.sh --fix

# The fast engine, with the sanitizers' run-time libraries first in the process, and libstdc++ with them (they
# wrap its throw). ThreadSanitizer cannot place its memory where addresses are very random.
asan tsan: library = $(CURDIR)/build-$@/libascend_moe.so
asan: flags := address,undefined
tsan: flags := thread
# The compiled kernels of torch's ops too, though torch itself is not built so: threads share them.
tsan: torch_kernels := ascend_moe_torch
tsan: fixed_addresses = $(shell setarch -R true 2>/dev/null && echo setarch -R)
asan tsan: sanitized = $(fixed_addresses) env ASCEND_MOE_LIBRARY=$(library) ASCEND_MOE_SANITIZE=$(flags) \
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$@.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
	TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:history_size=4

asan tsan: $(bin)/scikit-build-core
	$(pip_install) .[test]
	cmake -S . -B build-$@ -DCMAKE_CXX_COMPILER=$(CXX) -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g1' \
		-DASCEND_MOE_SANITIZE=$(flags) -DASCEND_MOE_CHECKED=OFF -DASCEND_MOE_VNPU=OFF \
		-DPython3_EXECUTABLE=$(bin)/python -DASCEND_MOE_TORCH=$(if $(torch_kernels),ON,OFF)
	cmake --build build-$@ --target ascend_moe $(torch_kernels)
	$(sanitized) $(bin)/python tools/sanitizer_control.py $(library) $(flags)
	$(pytest) -n 2 -m $@ --capture=sys $(PYTEST_ARGS)

# Broken kernels, each built and each found: about half an hour.
mutants: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) --timeout=3600 -m mutants $(PYTEST_ARGS)

# All cases of the rows that `make test` takes a few of, the counts printed in the end: hours on two cores.
soak: $(bin)/scikit-build-core
	$(pip_install) .[test]
	export ASCEND_MOE_SOAK=full ASCEND_MOE_SOAK_REPORT=$(CURDIR)/build/soak.json; \
		$(pytest) --timeout=14400 -o faulthandler_timeout=0 -n 2 -m row $(PYTEST_ARGS)

explore: install
	$(bin)/ascend-moe explore $(EXPLORE_ARGS)

model: $(bin)/scikit-build-core
	@command -v spin > /dev/null || { echo "make model needs spin: apt-get install spin"; exit 2; }
	$(PYTHON) model/run.py $(MODEL_ARGS)

bench bench-check: $(bin)/scikit-build-core
	$(pip_install) .[bench]
	$(bench)

bench: bench = $(bin)/ascend-moe bench $(BENCH_ARGS)
bench-check: bench = $(bin)/ascend-moe bench --check

lib:
	cmake -S . -B build/dev $(if $(wildcard $(bin)/python),-DPython3_EXECUTABLE=$(bin)/python)
	cmake --build build/dev
	cmake --install build/dev --prefix . --component lib

wheel: $(bin)/scikit-build-core
	$(bin)/python -m pip wheel --no-deps --wheel-dir dist .

# Compiles every kernel entry and the host side against real CANN headers. asc-devkit has no headers of graph and
# op base: METADEF, CANN_BASE and CANN_INCLUDE say where those are.
headers-check:
	@test -d "$(CANN_HEADERS)" || { echo "usage: make headers-check CANN_HEADERS=dir [METADEF=dir CANN_BASE=dir CANN_INCLUDE='dir dir']"; exit 2; }
	$(PYTHON) tools/headers_check.py "$(CANN_HEADERS)"
	$(PYTHON) tools/host_headers_check.py "$(CANN_HEADERS)" $(if $(METADEF),--metadef $(METADEF)) \
		$(if $(CANN_BASE),--base $(CANN_BASE)) $(foreach dir,$(CANN_INCLUDE),--include $(dir))

# clang finds address-space mistakes (__gm__ and __ubuf__ pointers mixed) that g++ cannot see.
address-space-check:
	$(PYTHON) tools/address_space_check.py

clean:
	rm -rf build build-asan build-tsan dist ascend_moe/lib .mypy_cache .ruff_cache tests/.hypothesis
