# Each sets up its own environment from nothing:
#   make demo       five strategies race
#   make test       what runs for every change: style, types, and the tests in two lanes (tests/conftest.py)
#   make check      the first half of it: style, types, and the rules of the architecture
#   make nightly    the tests that take longer, or need more, in parts: make nightly PART=laws runs one of them
VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
ABREAST := -n 3 --dist worksteal  # three on two cores: many tests mostly wait
PAIRED := -n 2 --dist worksteal  # timed tests: one for each core
PART ?= laws paths docs launch libraries lab browser soak

unexport PYTHONDONTWRITEBYTECODE  # else every process of every test would compile the package again

.PHONY: setup demo test check nightly bench docs clean $(addprefix nightly-,laws paths docs launch libraries lab browser soak)

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python -m orchestra demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) tests/architecture

# Both lanes run, also when the first fails: one run names all that is wrong.
test: check
	failed=0; \
	$(PYTEST) src tests --ignore tests/architecture -m "not timed and not nightly" $(ABREAST) || failed=1; \
	$(PYTEST) tests -m "timed and not nightly" $(PAIRED) || failed=1; \
	exit $$failed

# All parts run, also when one fails.
nightly: setup
	@failed=; for part in $(PART); do $(MAKE) --no-print-directory nightly-$$part || failed="$$failed $$part"; done; \
	if test -n "$$failed"; then echo "nightly: failed:$$failed"; exit 1; fi; echo "nightly: all of it passed: $(PART)"

nightly-laws: setup
	@echo "nightly laws: every example of every strategy in processes; a thousand orders of events in virtual time"
	$(PYTEST) tests -m "nightly and not timed" --ignore tests/docs --ignore tests/launch $(ABREAST) --timeout 1200

nightly-paths: setup
	@echo "nightly paths: every example of every strategy in processes that are killed or interrupted by Ctrl-C"
	$(PYTEST) tests -m "nightly and timed" --ignore tests/browser --ignore tests/lab \
	  --ignore tests/prepare/test_libraries.py --timeout 600

nightly-docs: setup
	@echo "nightly docs: the site is built, and every block of every page runs"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(PYTEST) tests/docs -m nightly --timeout 600

nightly-launch: setup
	@echo "nightly launch: hosts behind a private sshd (apt-get install openssh-server); runs on Ray"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray]'
	$(PYTEST) tests/launch -m nightly --timeout 600

nightly-libraries: setup
	@echo "nightly libraries: Accelerate, the Trainer of transformers, and Lightning"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[libraries]'
	$(PYTEST) tests/prepare/test_libraries.py -m nightly --timeout 600

nightly-lab: setup
	@echo "nightly lab: networks of this machine that are slow and break (as root, apt-get install iproute2)"
	$(PYTEST) tests/lab -m nightly --timeout 600

nightly-browser: setup
	@echo "nightly browser: reports and the live page in Chromium (apt-get install chromium)"
	$(PYTEST) tests/browser -m nightly --timeout 600

nightly-soak: setup
	@echo "nightly soak: three minutes of training, in which memory and descriptors must not grow"
	$(BIN)/python -m benchmarks.soak --minutes 3 --steady

bench: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.all

docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache
