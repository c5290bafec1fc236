# `make` targets are the whole workflow. Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := torch==2.13.0
DATA ?= ../shared/data

.PHONY: install install-dev demo test test-full lint bench bench-lab results policies families train screenshot soak soak-memory tenant-timing fuzz clean

# torch first and pinned: an open range would bring gigabytes of CUDA packages
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(TORCH)

$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[demo,eval]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet -e '.[demo,test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.fuzz: pyproject.toml | $(VENV)/.dev
	$(BIN)/pip install --quiet -e '.[fuzz]'
	@touch $@

install: $(VENV)/.demo

install-dev: $(VENV)/.dev

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest -m "not full" -n 2 --dist worksteal

test-full: lint
	HEADWATER_TEST_FULL=1 $(BIN)/pytest -n 2 --dist worksteal

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.run $(BENCH)

# how fast the lab is, on recorded traffic: make bench-lab DATA=... PEERS=...
bench-lab: $(VENV)/.dev
	$(BIN)/python -m benchmarks.lab $(if $(DATA),--data $(DATA)) $(if $(PEERS),--peers $(PEERS))

# every policy on every trace at four sizes, and the page that shows it: make policies DATA=...
policies: $(VENV)/.dev
	$(BIN)/python -m benchmarks.policies $(if $(DATA),--data $(DATA))

# the papers' figures on recorded traffic, and the page that shows them: make results [DATA=...] [PEERS=...] [FIGURES=marconi]
# without FIGURES all of them, with those that need an engine
results: $(VENV)/.dev
	$(BIN)/python -m papers $(FIGURES) --data $(DATA) --peers $(or $(PEERS),$(DATA)/../peers) --out docs/results
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.sparse --data $(DATA) --out docs/results)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.segment_states --out docs/results)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.segments --out docs/results)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.segment_quality --out docs/results)
	$(BIN)/python -m papers --page docs/results.md --out docs/results

# the page of all families, from the code
families: $(VENV)/.dev
	$(BIN)/python -m headwater.models.families.page docs/families.md

# the embedded model, from scratch; goes on where an earlier run stopped: make train TEXTS=FOLDER [RECIPE=smoke] [BEGIN=CHECKPOINT]
train: $(VENV)/.dev
	$(BIN)/python -m training --recipe $(or $(RECIPE),cpu) --out build/training-$(or $(RECIPE),cpu) $(if $(TEXTS),--texts $(TEXTS)) $(if $(BEGIN),--begin $(BEGIN))
	$(BIN)/python -m training.curve build/training-$(or $(RECIPE),cpu) build/training-$(or $(RECIPE),cpu)/curve.png

# of the live page, for the docs: needs chromium and chromedriver
screenshot: $(VENV)/.dev
	$(BIN)/python examples/screenshot.py

soak: $(VENV)/.dev
	$(BIN)/python -m stress.soak --for $(or $(SOAK),3m)

soak-memory: $(VENV)/.dev
	$(BIN)/python -m stress.memory

tenant-timing: $(VENV)/.dev
	$(BIN)/python -m stress.tenant_timing

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m stress.fuzz --for $(or $(FUZZ),60s) $(TARGETS)

clean:
	rm -rf $(VENV) build dist
