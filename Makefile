# One command each:
#   make               venv + install (always rebuilds what changed)
#   make demo          the same, then a MoE layer over 4 ranks        DEMO_ARGS="--preset tiny"
#   make test          the same, then all tests                       PYTEST_ARGS="-k dispatch"
#   make lint  format  ruff, mypy --strict, clang-format
#   make asan          the tests marked asan under ASan and UBSan, with controls that must fail
#   make mutants       one-line kernel mutants, each found by the suite
#   make lib           the library into the source tree, for PYTHONPATH=. without installing
#   make wheel  clean  headers-check CANN_HEADERS=dir  address-space-check

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
DEMO_ARGS ?=
PYTEST_ARGS ?=

bin := $(abspath $(VENV))/bin
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests run from tests/ so that they import the installed package, never the source tree.
pytest = cd tests && ASCEND_MOE_TEST_INSTALLED=1 $(bin)/pytest --timeout=300

# pip is asked for torch and for the project in one command, so that it never picks another torch. It always
# runs, no stamp file: outside pip's build isolation the build directory is kept, and only what changed is
# compiled. The first time it shows what it downloads, later it is quiet.
pip_install = $(bin)/python -m pip install $(if $(wildcard $(bin)/ascend-moe),--quiet) \
	--no-build-isolation $(foreach word,$(TORCH),'$(word)')

.NOTPARALLEL:
.DEFAULT_GOAL := install
.PHONY: install demo test lint format asan mutants lib wheel clean headers-check address-space-check

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
	$(pytest) -n 2 $(PYTEST_ARGS)

lint: $(bin)/scikit-build-core
	$(pip_install) .[dev]
	PATH="$(bin):$$PATH" tools/lint.sh

format: $(bin)/scikit-build-core
	$(pip_install) .[dev]
	PATH="$(bin):$$PATH" tools/lint.sh --fix

# The sanitizers' run-time libraries come first in the process, libstdc++ with them (they wrap its throw).
asan_flags := address,undefined
asan_library := $(CURDIR)/build-asan/libascend_moe.so
asan_env = ASCEND_MOE_LIBRARY=$(asan_library) \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1

asan: $(bin)/scikit-build-core
	$(pip_install) .[test]
	cmake -S . -B build-asan -DCMAKE_CXX_COMPILER=$(CXX) -DASCEND_MOE_SANITIZE=$(asan_flags)
	cmake --build build-asan
	$(asan_env) $(bin)/python tools/sanitizer_control.py $(asan_library)
	export $(asan_env); $(pytest) -n 2 -m asan $(PYTEST_ARGS)

# One-line kernel mutants, each built and each found by the suite: about 10 minutes.
mutants: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) --timeout=3600 -m mutants test_mutants.py $(PYTEST_ARGS)

lib:
	cmake -S . -B build/dev
	cmake --build build/dev
	cmake --install build/dev --prefix . --component lib

wheel: $(bin)/scikit-build-core
	$(bin)/python -m pip wheel --no-deps --wheel-dir dist .

# Compiles every kernel entry against real AscendC headers.
headers-check:
	@test -d "$(CANN_HEADERS)" || { echo "usage: make headers-check CANN_HEADERS=dir (with the AscendC headers)"; exit 2; }
	$(PYTHON) tools/headers_check.py "$(CANN_HEADERS)"

# clang finds address-space mistakes (__gm__ and __ubuf__ pointers mixed) that g++ cannot see.
address-space-check:
	$(PYTHON) tools/address_space_check.py

clean:
	rm -rf build build-asan dist ascend_moe/lib .mypy_cache .ruff_cache tests/.hypothesis
