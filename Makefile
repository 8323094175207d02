# Every target sets up .venv by itself; no GPU is needed.
PYTHON ?= python3
JOBS ?= auto
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-gpu lint docs fuzz mutate bench kernel-diff oldest-triton shipped-kernels clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## Make the virtual environment and install the project into it

demo: $(STAMP) ## Train a small character model whose attention is a text program (a few minutes)
	$(BIN)/python examples/char_model/train.py $(DEMO)

# Without bytecode each process compiles the package and rewrites all tests anew.
test: $(STAMP) ## Run the tests
	env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(TESTS)

test-gpu: $(STAMP) ## Run the tests that need a GPU, on all there are (GPU="--minutes 9 --continue FILE")
	$(BIN)/python tools/gpu_tests.py $(GPU)

# mypy cannot follow the mapping of backends/ and grammar/ into the package, so it reads a copy
# as it would be installed.
lint: $(STAMP) ## Check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --no-compile --target build/typed .
	cd build/typed && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache

docs: $(STAMP) ## Build the documentation site into build/site, with all links checked
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

fuzz: $(STAMP) ## Run random programs, fresh ones until stopped (FUZZ="--count 20000 --processes 2")
	$(BIN)/python tests/fuzz/run.py $(FUZZ)

mutate: $(STAMP) ## Change the code by small defects and see that tests fail (MUTATE="--part 2/5 --minutes 60")
	$(BIN)/python tools/mutate.py $(MUTATE)

bench: $(STAMP) ## Measure what this machine can run; results go to benchmarks/results/
	$(BIN)/python benchmarks/run.py $(BENCH)

kernel-diff: $(STAMP) ## Compare the kernels of two commits without a GPU (BASE=main NEW=. DIFF="--sample")
	$(BIN)/python tools/kernel_diff.py $(or $(BASE),HEAD) $(or $(NEW),.) $(DIFF)

# torch's builds for CUDA bring it. Beside a newer torch it is found first on the path.
OLDEST := $(VENV)/triton-3.6.0
$(OLDEST): | $(STAMP)
	$(BIN)/pip install --quiet --no-deps --no-compile --target $@.part triton==3.6.0
	mv $@.part $@

oldest-triton: $(STAMP) $(OLDEST) ## Trace kernels with the oldest Triton, without a GPU (DIFF="--only causal")
	PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python tools/kernel_diff.py . . $(or $(DIFF),--sample)

shipped-kernels: $(STAMP) $(OLDEST) ## Compile the kernels that a wheel brings along, for two versions of Triton
	$(BIN)/python tools/shipped_kernels.py --triton $(OLDEST)
	$(BIN)/python tools/shipped_kernels.py

clean: ## Remove build products and caches, not the virtual environment
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
