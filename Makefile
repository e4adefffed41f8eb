# Two commands: `make demo` shows what ecnn does, `make test` checks that it does it. Both build .venv first.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   ?= .venv
MINUTES ?= 10

BIN   := $(VENV)/bin
READY := $(VENV)/ready
PEERS := $(VENV)-peers
# One process per core and one thread each: the networks of the tests are too small to share. A process that has nothing
# left takes tests from another.
TEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo install test test-fast test-all test-peers peers check format codebook bench campaign pictures docs clean help

help:
	@echo "make demo       design a code, train three networks, attack and audit them; open out/report.html"
	@echo "make install    only install ecnn, in $(VENV)"
	@echo "make test       the test suite (make test-fast: its quick part, make test-all: everything)"
	@echo "make test-peers compare with other libraries, in an environment of their own ($(PEERS), see peers.txt)"
	@echo "make campaign   kills, faults, damaged files and wrong inputs for MINUTES=$(MINUTES), and a table of what broke"
	@echo "make pictures   the pictures of the page and the report that README shows, of what make demo left; needs a Chromium"
	@echo "make check      ruff and mypy (make format: let ruff rewrite)"
	@echo "make codebook   design the shipped codes again        make bench   do the benchmarks still run?"
	@echo "make docs       the docs as a site, in out/site"
	@echo "Settings: PYTHON=$(PYTHON)  TORCH='$(TORCH)'  VENV=$(VENV)"

demo: $(READY)
	$(BIN)/ecnn quickstart --out out

install: $(READY)
	@echo "ecnn is installed in $(VENV): . $(BIN)/activate, then ecnn --help"

test: $(READY)
	$(TEST) -m "not peer and not gpu and not full"

test-fast: $(READY)
	$(TEST) -m "not slow and not peer and not gpu and not full and not browser"

test-all: $(READY)
	$(BIN)/python -m pytest

test-peers: $(PEERS)/peers
	OMP_NUM_THREADS=1 $(PEERS)/bin/python -m pytest -n auto --dist worksteal -m peer

peers: $(PEERS)/peers

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

codebook: $(READY)
	$(BIN)/python tools/make_codebook.py

bench: $(READY)
	for name in annealing training baselines estimators attacks fast scale audit serving; do $(BIN)/python benchmarks/$$name.py --quick || exit 1; done

# The browser tests take these pictures in every run and leave them in out/pictures: here of the demo, for README.
pictures: demo
	ECNN_DEMO=out ECNN_PICTURES=docs/images ECNN_REQUIRE_BROWSER=1 $(TEST) -n 0 -m browser -k picture

campaign: $(READY)
	PYTHONPATH=tools $(BIN)/python -m campaign --minutes $(MINUTES)

docs: $(VENV)/docs
	$(BIN)/python -m mkdocs build --strict --quiet
	@echo "open out/site/index.html"

$(VENV)/docs: $(READY)
	$(BIN)/python -m pip install --quiet -c $(VENV)/torch.txt -c constraints.txt -e ".[docs]"
	@touch $@

# torch comes first and alone: whatever build of it is chosen then constrains all the rest, so that no other package
# can pull another one. constraints.txt pins everything that torch does not bring.
$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "ecnn needs Python 3.11 or newer, but '$(PYTHON)' is not: install one and say make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "'$(PYTHON)' cannot make virtual environments: install its venv package (on Debian: python3-venv)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)" "$$(grep '^numpy==' constraints.txt)"
	$(BIN)/python -m pip freeze --exclude-editable > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet -c $(VENV)/torch.txt -c constraints.txt -e ".[dev]"
	@touch $@

$(PEERS)/peers: pyproject.toml constraints.txt peers.txt
	$(MAKE) VENV=$(PEERS) $(PEERS)/ready
	$(PEERS)/bin/python -m pip install --quiet --no-deps -r peers.txt
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
