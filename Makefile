# One command each:
#   make               venv + install with the fast engine; the other engines are built when first used
#   make all           the same with every engine and the virtual NPU
#   make demo          a MoE layer over 4 ranks                            DEMO_ARGS="--preset tiny"
#   make tiny          does the installation work: under 10 s after the build
#   make t             the tests of a folder, on the fast engine           T=kernels/direct or ../twin/tests
#   make test          what every change must pass: 5 minutes on 2 cores   PYTEST_ARGS="-k dispatch"
#   make test-npu      the same on the virtual NPU, with the torch_npu wheel beside the environment
#   make test-vllm-ascend  vLLM and vllm-ascend generate on the virtual NPU, in an environment of their own   VLLM_ASCEND=0.26.0rc1
#   make vnpu          a program with torch_npu on the virtual NPU          VNPU_RUN="python mine.py"
#   make nightly       everything else, for hours: slow tests, mutants, soak, explore, model, asan, tsan, bench-check, wheels
#   make lint  format  ruff, mypy --strict, clang-format, docstrings of public names
#   make asan  tsan    the tests marked so under ASan and UBSan, or TSan, with controls that must fail
#   make mutants       broken kernels: one-line mutants found by the suite, the others by the checked twin
#   make kernel-coverage  the lines of op_kernel/ that no test and no schedule of a campaign reaches
#   make loop-coverage  the loops of op_kernel/ that no case brings to a third turn, and the engines that run each mode
#   make soak          the fault and load tests with their full counts, and the counts printed: ten minutes
#   make explore       schedules of the kernels on the checked twin       EXPLORE_ARGS="-n 100000"
#   make model         the protocol's model in spin, where it is there    MODEL_ARGS=--full
#   make bench         dispatch and combine against gloo, MPI and the machine's limit   BENCH_ARGS="--batch 32"
#   make bench-check   fails where the bounds of docs/performance.md are not kept
#   make size          files and lines by folder, and their limits         SINCE=commit
#   make lib           the libraries into the source tree, for PYTHONPATH=.:twin:vnpu without installing
#   make docs          the site of the documentation into build/site, in English and Chinese
#   make docs-serve    shows it while you write                            DOCS=mkdocs.zh.yml
#   make translations  pages in Chinese that are older than their sources, and what changed there
#   make wheel         dist/*.whl with everything, for every Python and torch from 2.10 on
#   make wheel-check   that wheel in clean environments                     WHEEL_PYTHON="python3.12" WHEEL_TORCH="2.13.0"
#   make release       dist/VERSION: sdist, this machine's wheel, sums; tries the wheel, uploads nothing
#   make opp-check     the operator package, built with CANN 9.1's own CMake functions   ASC_DEVKIT=dir [HOST_HEADERS=dir]
#   make real-ascendc  the kernels over CANN's own AscendC                 ASC_DEVKIT=dir ASC_TOOLS=dir
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu with any of them: torch for CPUs, a tenth of PyPI's with CUDA
#   make clean  headers-check CANN_HEADERS=dir  address-space-check

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
TORCH_NPU ?= torch_npu==2.13.0
VNPU_RUN ?= torchrun --nproc-per-node 4 examples/npu_moe_layer.py
DEMO_ARGS ?=
PYTEST_ARGS ?=
EXPLORE_ARGS ?=
MODEL_ARGS ?=
BENCH_ARGS ?=
WHEEL_PYTHON ?= $(or $(wildcard $(HOME)/.pyenv/versions/3.1[12].*/bin/python3),python3.11 python3.12)
WHEEL_TORCH ?= 2.10.0 2.13.0
REAL_ASCENDC_ARGS ?=
T ?= kernels/direct
DOCS ?= mkdocs.yml
# The commit that `make size` compares with: the one before, where the clone has it.
SINCE ?= $(shell git rev-parse --quiet --verify HEAD~1)

bin := $(abspath $(VENV))/bin
version := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell nproc)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Tests run from tests/ so that they import the installed package, never the source tree.
caches := ASCEND_MOE_CACHE=$(CURDIR)/build/kernels ASCENDC_TWIN_CACHE=$(CURDIR)/build/kernels/twin
pytest = cd tests && ASCEND_MOE_TEST_INSTALLED=1 $(caches) $(sanitized) $(bin)/pytest --timeout=300
everywhere := . ../twin/tests ../vnpu/tests

# torch comes first, from TORCH_INDEX where that is set: the ops are compiled against the headers of the one in the venv.
# Then pip is asked for torch and for the project in one command, so that it never picks another torch. It always runs,
# no stamp file: outside pip's build isolation the build directory is kept, and only what changed is compiled. The first
# time it shows what it downloads, later it is quiet.
pip = $(bin)/python -m pip install $(if $(wildcard $(bin)/ascend-moe),--quiet)
torch = $(foreach word,$(TORCH),'$(word)')

# Parts that take long to compile and that many never use: pyproject.toml leaves them out. An installation that has one
# keeps it.
parts := CHECKED TIMED VNPU
file_CHECKED := libascend_moe_checked.so
file_TIMED := libascend_moe_timed.so
file_VNPU := vnpu
installed = $(wildcard $(abspath $(VENV))/lib/python3*/site-packages/ascend_moe/lib/$(file_$1))
has = $(or $(filter $1,$(with)),$(installed))
new = $(strip $(foreach part,$(with),$(if $(call installed,$(part)),,$(part))))
defines = $(foreach part,$(parts),$(if $(call has,$(part)),--config-settings=cmake.define.ASCEND_MOE_$(part)=ON))
index = $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)')
pip_torch = $(pip) $(index) $(torch)
pip_install = $(if $(new),echo "installs $(new) for the first time: about a minute each on two cores" >&2 && )$(pip_torch) && $(pip) --no-build-isolation $(defines) $(torch)
all wheel release: with = $(parts)
test soak mutants explore nightly-tests real-ascendc: with = CHECKED TIMED
test-npu test-npu-nightly: with = CHECKED TIMED VNPU
vnpu vllm-ascend: with = VNPU

every_change := not npu and not nightly and not mutants

.NOTPARALLEL:
.DEFAULT_GOAL := install
.PHONY: install all demo tiny t test test-npu test-vllm-ascend vllm-ascend vnpu nightly nightly-tests test-npu-nightly lint \
	format asan tsan mutants soak explore model bench bench-check size lib wheel wheel-check clean headers-check address-space-check \
	real-ascendc asc-folders opp-check kernel-coverage loop-coverage docs docs-serve translations release

# The venv with the build backend, and cmake and ninja where the system has none.
$(bin)/scikit-build-core:
	test -x $(bin)/pip || $(PYTHON) -m venv $(VENV)
	$(bin)/python -m pip install --quiet scikit-build-core $(foreach tool,cmake ninja,$(if $(shell command -v $(tool)),,$(tool)))

install all: $(bin)/scikit-build-core
	$(pip_install) .[cli]

demo: install
	PYTHONSAFEPATH=1 $(bin)/ascend-moe run $(DEMO_ARGS)

tiny: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) -q test_tiny.py $(PYTEST_ARGS)

t: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) -n 2 -m "$(every_change)" $(T) $(PYTEST_ARGS)

test: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) -n 2 -m "$(every_change)" $(everywhere) $(PYTEST_ARGS)

# The wheel lies in a folder of its own, so that torch starts without CANN everywhere else.
torch_npu := $(CURDIR)/build/npu/$(subst ==,-,$(TORCH_NPU))
$(torch_npu): $(bin)/scikit-build-core
	rm -rf $@.part
	$(bin)/python -m pip install --quiet --no-deps --target $@.part '$(TORCH_NPU)'
	mv $@.part $@

vnpu: $(bin)/scikit-build-core $(torch_npu)
	$(pip_install) .[cli]
	PATH="$(bin):$$PATH" PYTHONPATH=$(torch_npu) $(bin)/ascend-moe vnpu -- $(VNPU_RUN)

test-npu: npu_tests = npu and not nightly
test-npu-nightly: npu_tests = npu and nightly
test-npu test-npu-nightly: $(bin)/scikit-build-core $(torch_npu)
	$(pip_install) .[test]
	export PYTHONPATH=$(torch_npu) TORCH_DEVICE_BACKEND_AUTOLOAD=0; $(pytest) -n 2 -m "$(npu_tests)" . ../vnpu/tests $(PYTEST_ARGS)

# Their packages are other versions than the tests', and their wheels ask for CUDA's libraries and another torch.
# One environment for each release of vllm-ascend; vLLM's is the same but for the candidate's number.
VLLM_ASCEND ?= 0.23.0
test-vllm-ascend:
	$(MAKE) VENV=build/vllm-venv$(filter-out -0.23.0,-$(VLLM_ASCEND)) vllm-ascend

transformers_0.26.0rc1 := transformers==5.14.1
vllm_ascend := vllm==$(firstword $(subst rc, ,$(VLLM_ASCEND))) vllm_ascend==$(VLLM_ASCEND) $(transformers_$(VLLM_ASCEND))
vllm_ascend += compressed-tensors==0.17.0 xgrammar==0.2.9 apache-tvm-ffi torchvision==0.28.0
vllm-ascend: $(bin)/scikit-build-core $(torch_npu)
	$(pip_install) .[test]
	$(pip) $(torch) -r vnpu/tests/vllm_ascend.txt
	$(pip) $(index) --no-deps $(vllm_ascend)
	export PYTHONPATH=$(torch_npu) TORCH_DEVICE_BACKEND_AUTOLOAD=0; \
		$(pytest) --timeout=1200 -o faulthandler_timeout=0 -m nightly ../vnpu/tests/test_vllm_ascend.py $(PYTEST_ARGS)

# Every lane that .ci/run leaves out, each to its end whatever the others find. The list of failures comes last.
nightly_lanes := nightly-tests test-npu-nightly test-vllm-ascend mutants soak explore-nightly model-nightly asan tsan
nightly_lanes += kernel-coverage loop-coverage bench-check wheel-check release translations address-space-check
nightly_lanes += $(if $(and $(ASC_DEVKIT),$(ASC_TOOLS)),real-ascendc) $(if $(ASC_DEVKIT),opp-check)
nightly:
	@failed=""; for lane in $(nightly_lanes); do \
		echo "nightly: $$lane"; \
		case $$lane in \
			explore-nightly) $(MAKE) explore EXPLORE_ARGS="-n 100000" ;; \
			model-nightly) $(MAKE) model MODEL_ARGS=--full ;; \
			*) $(MAKE) $$lane NIGHTLY=1 ;; \
		esac || failed="$$failed $$lane"; \
	done; test -z "$$failed" || { echo "nightly: FAIL in$$failed"; exit 1; }; echo "nightly: PASS"

nightly-tests: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) -o faulthandler_timeout=0 -n 2 --dist worksteal -m "nightly and not npu and not mutants" $(everywhere) $(PYTEST_ARGS)

lint: $(bin)/scikit-build-core
	$(pip_install) .[dev]
	PATH="$(bin):$$PATH" tools/lint.sh

format: $(bin)/scikit-build-core
	$(pip_install) .[dev]
	PATH="$(bin):$$PATH" tools/lint.sh --fix

# The fast engine, with the sanitizers' run-time libraries first in the process, and libstdc++ with them (they
# wrap its throw). ThreadSanitizer cannot place its memory where addresses are very random.
asan tsan: library = $(CURDIR)/build-$@/libascend_moe.so
asan tsan: leave_out ?= $(if $(NIGHTLY),, and not nightly)
asan: flags := address,undefined
tsan: flags := thread
tsan: fixed_addresses = $(shell setarch -R true 2>/dev/null && echo setarch -R)
asan tsan: sanitized = $(fixed_addresses) env ASCEND_MOE_LIBRARY=$(library) ASCEND_MOE_SANITIZE=$(flags) \
	LD_PRELOAD="$$($(CXX) -print-file-name=lib$@.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 \
	TSAN_OPTIONS=ignore_noninstrumented_modules=1:halt_on_error=1:history_size=4

asan tsan: $(bin)/scikit-build-core
	$(pip_install) .[test]
	cmake -S . -B build-$@ -DCMAKE_CXX_COMPILER=$(CXX) -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG='-O1 -g1' \
		-DASCEND_MOE_SANITIZE=$(flags) -DASCEND_MOE_CHECKED=OFF -DASCEND_MOE_TIMED=OFF -DASCEND_MOE_VNPU=OFF \
		-DPython3_EXECUTABLE=$(bin)/python -DASCEND_MOE_TORCH=ON
	cmake --build build-$@ --target ascend_moe ascend_moe_torch
	$(sanitized) $(bin)/python tools/sanitizer_control.py $(library) $(flags)
	$(pytest) -n 2 -m "$@$(leave_out)" --capture=sys $(everywhere) $(PYTEST_ARGS)

# The fast engine counts in the tests, the checked one in the campaign and in the tests that have it.
kernel-coverage: sanitized = $(bin)/python ../tools/kernel_coverage.py --run tests ../build-coverage
kernel-coverage: $(bin)/scikit-build-core
	$(pip_install) .[test,cli]
	cmake -S . -B build-coverage -DCMAKE_CXX_COMPILER=$(CXX) -DASCEND_MOE_COVERAGE=ON -DASCEND_MOE_TIMED=OFF \
		-DASCEND_MOE_VNPU=OFF -DPython3_EXECUTABLE=$(bin)/python -DASCEND_MOE_TORCH=ON
	cmake --build build-coverage --target ascend_moe ascend_moe_checked ascend_moe_torch
	rm -rf build-coverage/runs
	$(pytest) -n 2 -m "$(every_change)" kernels torch tools/test_validate.py $(PYTEST_ARGS)
	$(bin)/python tools/kernel_coverage.py --run campaign build-coverage $(bin)/ascend-moe explore -n 5000
	$(bin)/python tools/kernel_coverage.py build-coverage

# The cells that cases of a campaign do not fill are tests': of lost ranks, of many ranks, of layer ops.
loops := $(bin)/python tools/loop_coverage.py
in_loops = cd tests && ASCEND_MOE_TEST_INSTALLED=1 ASCEND_MOE_CACHE=$(CURDIR)/build/kernels \
	$(bin)/python ../tools/loop_coverage.py --run $(1) ../build-loops $(2) $(bin)/pytest --timeout=300
loop-coverage: $(bin)/scikit-build-core
	$(pip_install) .[test,cli]
	$(loops) --build build-loops
	$(loops) --campaign 5000 build-loops
	$(call in_loops,tests) -n 2 -m "$(every_change)" kernels $(PYTEST_ARGS)
	$(call in_loops,256-ranks) -m nightly "kernels/test_many_ranks.py::test_equal_to_reference[256-1-direct-1]" \
		"kernels/test_many_ranks.py::test_between_servers_equal_to_reference[264-8-0-1-window]"
	$(call in_loops,layer-ops-fast) layers/test_layer_ops.py
	$(call in_loops,layer-ops-checked,env ASCEND_MOE_LIBRARY=$(CURDIR)/build-loops/libascend_moe_checked.so) \
		layers/test_layer_ops.py
	$(loops) build-loops

# Broken kernels, each built and each found: about half an hour.
mutants: $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(pytest) --timeout=3600 -o faulthandler_timeout=0 -n 2 --dist worksteal -m mutants $(PYTEST_ARGS)

# All cases of the rows that `make test` takes a few of, the counts printed in the end: ten minutes on two cores.
soak: $(bin)/scikit-build-core
	$(pip_install) .[test]
	export ASCEND_MOE_SOAK=full ASCEND_MOE_SOAK_REPORT=$(CURDIR)/build/soak.json; \
		$(pytest) --timeout=14400 -o faulthandler_timeout=0 -n 2 -m row $(PYTEST_ARGS)

explore: $(bin)/scikit-build-core
	$(pip_install) .[cli]
	$(bin)/ascend-moe explore $(EXPLORE_ARGS)

model: $(bin)/scikit-build-core
	@command -v spin > /dev/null || { echo "make model needs spin: apt-get install spin"; exit 2; }
	$(PYTHON) model/run.py $(MODEL_ARGS)

bench bench-check: $(bin)/scikit-build-core
	$(pip_install) .[bench]
	$(bench)

bench: bench = $(bin)/ascend-moe bench $(BENCH_ARGS)
bench-check: bench = $(bin)/ascend-moe bench --check

size:
	@$(PYTHON) tools/size.py $(SINCE)

lib:
	cmake -S . -B build/dev $(if $(wildcard $(bin)/python),-DPython3_EXECUTABLE=$(bin)/python)
	cmake --build build/dev
	cmake --install build/dev --prefix . --component lib

# What pyproject.toml lists for an extra.
extra = $(shell sed -n 's/^$1 = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d ,)

# An environment of its own: the site needs neither torch nor a compiler.
docs_bin := $(CURDIR)/build/docs-venv/bin
$(docs_bin)/mkdocs: pyproject.toml
	test -x $(docs_bin)/pip || $(PYTHON) -m venv $(CURDIR)/build/docs-venv
	$(docs_bin)/pip install --quiet $(call extra,docs)
	touch $@

docs: $(docs_bin)/mkdocs
	NO_MKDOCS_2_WARNING=1 $(docs_bin)/mkdocs build --strict --quiet
	NO_MKDOCS_2_WARNING=1 $(docs_bin)/mkdocs build --strict --quiet -f mkdocs.zh.yml

docs-serve: $(docs_bin)/mkdocs
	NO_MKDOCS_2_WARNING=1 $(docs_bin)/mkdocs serve -f $(DOCS)

# Fails where a page in another language is older than its source, or shows other code.
translations:
	$(PYTHON) tools/translations.py

wheel: $(bin)/scikit-build-core
	$(pip_torch)
	$(bin)/python -m pip wheel --no-build-isolation --no-deps $(defines) --wheel-dir dist .

wheel-check: wheel
	set -e; for python in $(WHEEL_PYTHON); do for torch in $(WHEEL_TORCH); do \
		tools/wheel_check.sh dist/ascend_moe-*-py3-none-*.whl $$python torch==$$torch $(index); done; done

# The sdist and, built from it, the wheel for this machine; with the same tools a commit gives the same bytes.
release: out = dist/$(version)
release: source = $(CURDIR)/build/release/ascend_moe-$(version)
release: $(bin)/scikit-build-core
	@test -z "$$(git status --porcelain)" || { echo "a release is made of a commit: commit or remove what git status shows"; exit 1; }
	$(pip_torch)
	$(bin)/python -m pip install --quiet $(call extra,release)
	rm -rf build/release $(out)
	$(bin)/python -m build --sdist --no-isolation --outdir $(out) .
	mkdir -p build/release && tar -xf $(out)/*.tar.gz -C build/release
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) CXXFLAGS="-ffile-prefix-map=$(source)=." $(bin)/python -m pip wheel \
		--no-build-isolation --no-deps $(defines) --config-settings=cmake.define.ASCEND_MOE_NPU=OFF \
		--wheel-dir build/release $(source)
	PATH="$(bin):$$PATH" auditwheel repair --plat manylinux_2_35_$$(uname -m) --exclude 'libtorch*' --exclude 'libc10*' \
		--wheel-dir $(out) build/release/*.whl
	$(bin)/twine check --strict $(out)/*
	tools/wheel_check.sh $(out)/*.whl $(PYTHON) $(torch) $(index)
	cd $(out) && sha256sum * > SHA256SUMS

# Compiles every kernel entry against real CANN headers, and the host side where they are a toolkit's.
headers-check:
	@test -d "$(CANN_HEADERS)" || { echo "usage: make headers-check CANN_HEADERS=dir [HOST_HEADERS=dir]"; exit 2; }
	$(PYTHON) tools/headers_check.py "$(CANN_HEADERS)"
	$(PYTHON) tools/headers_check.py "$(or $(HOST_HEADERS),$(CANN_HEADERS))" --host

# Runs the kernels over CANN's own AscendC implementation, with our models of the instructions below it.
asc-folders:
	@test -d "$(ASC_DEVKIT)" -a -d "$(ASC_TOOLS)" || { echo "usage: make real-ascendc ASC_DEVKIT=dir ASC_TOOLS=dir, \
	checkouts of CANN's asc-devkit and asc-tools"; exit 2; }
real-ascendc: asc-folders $(bin)/scikit-build-core
	$(pip_install) .[test]
	$(bin)/python tools/real_ascendc/check.py "$(ASC_DEVKIT)" "$(ASC_TOOLS)" $(REAL_ASCENDC_ARGS)

# Builds the operator package with CANN's own functions and compares it with one of the standard template.
opp-check:
	@test -d "$(ASC_DEVKIT)" || { echo "usage: make opp-check ASC_DEVKIT=dir [HOST_HEADERS=dir], a checkout of CANN's \
	asc-devkit, and a toolkit whose host headers are taken in the place of our own"; exit 2; }
	$(PYTHON) tools/opp_check/opp_check.py "$(ASC_DEVKIT)" $(if $(HOST_HEADERS),--host-headers "$(HOST_HEADERS)")

# clang finds address-space mistakes (__gm__ and __ubuf__ pointers mixed) that g++ cannot see.
address-space-check:
	$(PYTHON) tools/address_space_check.py

clean:
	rm -rf build build-asan build-coverage build-loops build-tsan dist ascend_moe/lib .mypy_cache .ruff_cache
