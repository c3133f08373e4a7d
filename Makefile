# Two commands do everything: `make demo` and `make test`. Both set up .venv by themselves.

PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)

# For the GPU targets: a Python whose PyTorch is a CUDA build, with cuda-bindings, pytest, hypothesis.
GPU_PYTHON ?= python3

.PHONY: demo test lint types docs test-cpu test-corpus test-compile corpus test-gpu test-oldest-torch package test-package examples sanitize sanitize-cpu stress results results-cpu results-status results-pages clean

# Verifies a few layers, compares their speed with PyTorch's, and writes plots and a page to demo/.
demo: .venv/demo-ready
	$(BIN)/fastconv demo --folder demo

test: lint types docs test-cpu

lint: .venv/ready
	$(BIN)/ruff check src tests tools docs/assets
	$(BIN)/ruff format --check src tests tools docs/assets
	find src tests -name '*.cuh' -o -name '*.h' -o -name '*.cc' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python tests/check_markdown.py

types: .venv/ready
	$(BIN)/mypy

# The site, in site/. A warning fails it: a broken link or anchor, a page outside of the navigation, a
# docstring that cannot be read. The variable silences the theme's advertisement.
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python tests/check_site.py site

# Two lanes of about equal length. What the first says comes last. A shell has what runs in the
# background ignore Ctrl-C, which test_command and test_jit are about: they are in the other lane.
# Dry runs look through all objects of their process, so those tests have a small one of their own.
DRY_RUNS := $(wildcard tests/network/test_dry_run_*.py) tests/network/test_preparation.py \
  tests/bench/test_bench_networks.py tests/api/test_public_names.py tests/test_snippets.py
DEPLOYMENT := tests/native/test_deploy.py tests/native/test_bundle.py
FIRST_LANE := tests/emulator $(DEPLOYMENT) $(DRY_RUNS)
test-cpu: .venv/ready
	@log=$$(mktemp); ($(BIN)/pytest -m "not gpu" tests/emulator; emulator=$$?; \
	  $(BIN)/pytest -m "not gpu" $(DEPLOYMENT); deployment=$$?; \
	  $(BIN)/pytest -m "not gpu" $(DRY_RUNS) && exit $$((emulator || deployment))) > $$log 2>&1 & first=$$!; \
	$(BIN)/pytest -m "not gpu" $(addprefix --ignore ,$(FIRST_LANE)); others=$$?; \
	wait $$first; status=$$?; cat $$log; rm $$log; exit $$((status || others))

# The whole coverage corpus, which every run has no time for: about an hour on two cores. With
# another SEED, other problems are planned. Then all cases of the tests that are sampled.
test-corpus: .venv/ready
	FASTCONV_CORPUS=$(or $(SEED),0) FASTCONV_PLANS=6000 $(BIN)/pytest tests/emulator tests/kernels/test_every_gpu.py
	FASTCONV_CORPUS=0 $(BIN)/pytest -m "sampled and not gpu" --ignore tests/emulator tests

# All kernels of the suites' layers, for all GPUs with tensor cores: hours.
test-compile: .venv/ready
	FASTCONV_COMPILE_ALL=1 $(BIN)/pytest tests/kernels/test_kernels_compile.py

# Looks for classes of code that the coverage corpus lacks, and adds problems that have them.
corpus: .venv/ready
	PYTHONPATH=src:tests $(BIN)/python tests/emulator/corpus.py --seconds $(or $(SECONDS),300) --seed $(or $(SEED),0)

test-gpu:
	PYTHONPATH=src $(GPU_PYTHON) -m pytest -m gpu tests/gpu

# Exported files support older versions of PyTorch than the package does.
test-oldest-torch: examples
	$(PYTHON) -m venv .venv-oldest-torch
	.venv-oldest-torch/bin/pip install --quiet --disable-pip-version-check torch==2.0.1 'numpy<2'
	.venv-oldest-torch/bin/python tests/api/exported_file.py examples/*.py
	$(BIN)/fastconv export --shape "2x16x48 16x8x4 transposed stride=2" -o .venv-oldest-torch/layers.py
	.venv-oldest-torch/bin/python tests/api/exported_layers.py .venv-oldest-torch/layers.py

# Wheel and source distribution, in dist. The wheel is made from the source distribution, so that a
# file that is missing there is missed.
package:
	rm -rf dist
	$(PYTHON) -m venv --clear .venv-package
	.venv-package/bin/pip install --quiet --disable-pip-version-check build twine check-wheel-contents
	.venv-package/bin/python -m build
	.venv-package/bin/twine check --strict dist/*
	.venv-package/bin/check-wheel-contents dist/*.whl

# The wheel of `make package`: beside PyTorch and nothing else, then with what `verify` needs.
test-package:
	$(PYTHON) -m venv --clear .venv-package
	.venv-package/bin/pip install --quiet --disable-pip-version-check torch==$(TORCH)
	.venv-package/bin/pip install --quiet --disable-pip-version-check dist/*.whl
	.venv-package/bin/python tests/api/installed.py
	.venv-package/bin/fastconv info
	.venv-package/bin/pip install --quiet --disable-pip-version-check "$$(ls dist/*.whl)[bench]"
	.venv-package/bin/pip check
	.venv-package/bin/fastconv verify --device cpu --random 20

# Version control has dilated5x9 alone: the others are large and much the same.
examples: .venv/ready
	for name in dilated5x9 asym5x9 square3x3; do \
	  $(BIN)/fastconv export --workload $$name -o examples/$$name.py || exit 1; \
	done

# Our kernels alone: PyTorch's own read uninitialised memory on purpose. The first run compiles, which
# would take long under the sanitizer. Why some tools do not see all kernels: sanitize.py.
SANITIZER = PYTHONPATH=src compute-sanitizer --error-exitcode 1 --report-api-errors no \
  --kernel-name kernel_substring=pack --kernel-name kernel_substring=weight_grad \
  --kernel-name kernel_substring=reduce --kernel-name kernel_substring=few_outputs \
  --kernel-name kernel_substring=wgrad_few_inputs --kernel-name kernel_substring=clear \
  --kernel-name kernel_substring=scale --kernel-name kernel_substring=implicit_gemm \
  --kernel-name kernel_substring=causal --kernel-name kernel_substring=batchnorm \
  --kernel-name kernel_substring=transpose --kernel-name kernel_substring=multiply_patches \
  --kernel-name kernel_substring=bias_grad --kernel-name kernel_name=copy \
  --kernel-name kernel_name=dense
CONVOLVE = --kernel-name kernel_substring=convolve
sanitize:
	for family in "" ampere depthwise grouped direct corpus; do \
	  PYTHONPATH=src $(GPU_PYTHON) tests/gpu/sanitize.py $$family || exit 1; \
	done
	for tool in memcheck synccheck; do for family in "" ampere depthwise grouped corpus; do \
	  $(SANITIZER) $(CONVOLVE) --tool $$tool $(GPU_PYTHON) tests/gpu/sanitize.py $$family || exit 1; \
	done; done
	for family in ampere depthwise grouped direct; do \
	  $(SANITIZER) $(CONVOLVE) --tool initcheck $(GPU_PYTHON) tests/gpu/sanitize.py $$family || exit 1; \
	done
	$(SANITIZER) --tool racecheck $(GPU_PYTHON) tests/gpu/sanitize.py ampere
	for family in depthwise grouped direct; do \
	  $(SANITIZER) $(CONVOLVE) --tool racecheck $(GPU_PYTHON) tests/gpu/sanitize.py $$family || exit 1; \
	done

# The CPU kernels on random problems, under AddressSanitizer and UBSan.
sanitize-cpu: .venv/ready
	FASTCONV_SANITIZED=2000 $(BIN)/pytest tests/native/test_cpu_kernels.py -k sanitizers

# Processes that compile side by side, are killed, and find the cache folder in every state.
stress:
	PYTHONPATH=src:tests $(GPU_PYTHON) tests/gpu/stress.py

# All figures of docs/results that are out of date, in calls of SECONDS: again, until nothing is left.
# JOBS="networks host" measures some of them alone.
RESULTS = PYTHONPATH=src:tools $(GPU_PYTHON) -m results
results:
	$(RESULTS) measure --seconds $(or $(SECONDS),440) $(if $(JOBS),--jobs $(JOBS))

results-cpu: .venv/ready
	PYTHONPATH=tools $(BIN)/python -m results measure --device cpu

# What is out of date, and why; and all pages from the files as they are. Both need no GPU.
results-status results-pages: .venv/ready
	PYTHONPATH=tools $(BIN)/python -m results $(@:results-%=%)

# The demo needs PyTorch and a few small packages; the tests add linters, compilers and ONNX to them.
# Torch first and by its exact version: asked for by a range, pip may take the newest release, with
# gigabytes of CUDA packages that a machine without a GPU has no use for.
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
comma := ,
.venv/demo-ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch==$(TORCH)
	$(INSTALL) -e '.[bench$(if $(shell command -v nvidia-smi),$(comma)cuda)]'
	touch $@

.venv/ready: .venv/demo-ready
	$(INSTALL) -e '.[bench,docs,test]'
	touch $@

clean:
	rm -rf demo .venv .venv-oldest-torch .venv-package dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
