# Everything happens in .venv; nothing else on the machine changes.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PACKAGES := pipeline modules kernels datamodules configs slurm
# A user's own Python settings must not leak into the checks.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-sources test tests test-all check soak bench docs clean

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "make: found $$($(PYTHON) --version), wanted Python 3.11 or newer (make PYTHON=...)"; exit 1; }
	$(PYTHON) -m venv .venv
	@echo "Installing 2.5 GB of packages into .venv: two to five minutes."
	$(BIN)/pip install $$([ -t 1 ] || echo --quiet) --disable-pip-version-check -c constraints.txt -e '.[dev]'
	mkdir -p .typing/longhaul
	for package in $(PACKAGES); do ln -sfn ../../$$package .typing/longhaul/$$package; done
	ln -sfn ../../pipeline/library/__init__.py .typing/longhaul/__init__.py
	touch $@

demo: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh demo.sh

demo-sources: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" sh demo-sources.sh

# One thread per process: two processes with two OpenMP threads each, on two cores, wait for each other.
# Four workers share two cores, since many tests mostly wait; three where more of them compute.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist loadfile --no-loadscope-reorder

# The checks run beside the tests.
test: setup
	$(MAKE) --no-print-directory -j 2 check tests

tests:
	$(PYTEST) -n 4 -m 'not wide and not soak and not gpu'

# What `make test` leaves out: more shapes, strategies and kills.
test-all: setup
	$(PYTEST) -n 3 -m 'wide and not soak and not gpu'

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=.typing $(BIN)/lint-imports

soak: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -m soak -s

bench: setup
	$(BIN)/longhaul bench kernels
	$(BIN)/longhaul bench delta
	$(BIN)/longhaul bench data

# Without the network; NO_MKDOCS_2_WARNING silences an announcement of mkdocs-material's.
docs: setup
	$(BIN)/python -P docs/scripts/configuration.py
	$(BIN)/python -P docs/scripts/measurements.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

clean:
	rm -rf .venv .typing site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -type d -exec rm -rf {} +
