# `make` targets are the whole workflow. Everything happens in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# the one pin of torch: pyproject.toml has the range that is tested
TORCH := torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
BUILD = $(if $(GPU)$(wildcard $(VENV)/.torch-cuda),cuda,cpu)
DATA ?= ../shared/data
# pip's bars of what it downloads, on a terminal
QUIET := $(shell test -t 2 || echo --quiet)

.PHONY: install install-dev demo demo-cluster test test-full test-cluster test-peers quick-tests all-tests test-clients lint bench bench-lab results policies cells served-cells served-policies pages families train screenshot soak four-ways soak-memory tenant-timing fuzz clean help

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python %d.%d is too old, 3.11 or later is needed: make demo PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# torch first and pinned. The build for CPUs (+cpu) is in PyTorch's index, or in one that pip is configured for; PyPI's build
# for Linux brings gigabytes of CUDA, the one for macOS has no such suffix. An index that does not answer costs 20 seconds.
$(VENV)/.torch-cpu: | $(BIN)/python
	@echo '$(TORCH), the build for CPUs: about 200 MB'
	@$(BIN)/pip install $(QUIET) --no-deps --timeout 10 --retries 1 --extra-index-url $(CPU_INDEX) $(TORCH)+cpu 2>$(VENV)/torch.log \
		|| { tail -n 1 $(VENV)/torch.log; echo 'No build for CPUs can be had, so the usual one is taken. For Linux it brings about 3 GB of CUDA packages.'; $(BIN)/pip install $(QUIET) $(TORCH); }
	@touch $@

$(VENV)/.torch-cuda: | $(BIN)/python
	$(if $(wildcard $(VENV)/.torch-cpu),$(BIN)/pip uninstall --quiet --yes torch)
	$(BIN)/pip install $(QUIET) $(TORCH)
	@touch $@

$(VENV)/.demo: pyproject.toml | $(VENV)/.torch-$(BUILD)
	$(BIN)/pip install $(QUIET) -e '.[serve,demo,eval]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch-$(BUILD)
	$(BIN)/pip install $(QUIET) -e '.[demo,test]'
	@touch $@ $(VENV)/.demo

$(VENV)/.papers: pyproject.toml | $(VENV)/.torch-$(BUILD)
	$(BIN)/pip install --quiet -e '.[papers]'
	@touch $@

$(VENV)/.fuzz: pyproject.toml | $(VENV)/.dev
	$(BIN)/pip install $(QUIET) -e '.[fuzz]'
	@touch $@

$(VENV)/.cluster: pyproject.toml | $(VENV)/.demo
	$(BIN)/pip install $(QUIET) -e '.[cluster]'
	@touch $@

install: $(VENV)/.demo

install-dev: $(VENV)/.dev

# GPU=1 make demo: with the CUDA build of torch, on a card
demo: $(VENV)/.demo
	$(if $(GPU),HEADWATER_DEVICE=cuda )$(BIN)/python -m headwater demo

# two workers on Ray behind a router, one of which is killed in the middle of an answer
demo-cluster: $(VENV)/.cluster
	$(BIN)/python examples/demo_cluster.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# the tests' two processes leave a part of two cores idle: lint runs beside them
test: $(VENV)/.dev
	$(MAKE) --jobs=2 lint quick-tests

test-full: $(VENV)/.dev
	$(MAKE) --jobs=2 lint all-tests

# compiled test modules are kept, whatever the environment says: compiling them takes 8 seconds of each process
quick-tests all-tests: export PYTHONDONTWRITEBYTECODE =

quick-tests: $(VENV)/.dev
	$(BIN)/pytest -m "not full and not clients and not peers" -n 2 --dist worksteal

all-tests: $(VENV)/.dev
	HEADWATER_TEST_FULL=1 $(BIN)/pytest -m "not clients and not peers" -n 2 --dist worksteal

# a cluster's longer checks, with hosts that are network namespaces (they need root): killed, cut off, stalled
test-cluster: $(VENV)/.dev
	HEADWATER_TEST_FULL=1 $(BIN)/pytest -m "not peers" -s tests/cluster tests/test_cluster_serve.py tests/test_cluster_roles.py tests/test_cluster_faults.py \
		tests/test_cluster_head.py tests/test_cluster_disk.py

# other engines, in environments that have them: KV events by vLLM's structures, GGUF files in llama.cpp (extra peers)
# make test-peers VENV_VLLM=FOLDER VENV_LLAMA=FOLDER VENV_MLX=FOLDER
test-peers: $(VENV)/.dev
	VENV_VLLM=$(VENV_VLLM) VENV_LLAMA=$(VENV_LLAMA) VENV_MLX=$(VENV_MLX) $(BIN)/pytest -m peers -rs tests/cluster tests/models

# on a card: kernels, graphs and drafts of every family, with and without the cache: GPU=1 make test-card
test-card: $(VENV)/.dev
	TRITON_INTERPRET=0 $(BIN)/pytest tests/card -n 8 --dist loadgroup

# real clients, each in an environment of its own below .clients, from the network: make test-clients [CLIENT=NAME]
test-clients: $(VENV)/.dev
	$(BIN)/pytest -m clients tests/clients$(if $(CLIENT), -k "[$(CLIENT)]")

bench: $(VENV)/.dev
	$(BIN)/python -m benchmarks.run $(BENCH) $(if $(DATA),--data $(DATA))

# how fast the lab is, on recorded traffic: make bench-lab DATA=... PEERS=...
bench-lab: $(VENV)/.dev
	$(BIN)/python -m benchmarks.lab $(if $(DATA),--data $(DATA)) $(if $(PEERS),--peers $(PEERS))

# every policy on every trace at four sizes, the best one by kind of traffic, the default against its rivals cell by cell and in drawn
# traffic, final seeds included, and the page that shows them; goes on where it stopped: make policies DATA=...
policies: cells
	$(BIN)/python -m benchmarks.grid --drawn --seeds final $(if $(DATA),--data $(DATA))
	$(BIN)/python -m benchmarks.policies $(if $(DATA),--data $(DATA))
	$(BIN)/python -m benchmarks.policy_map $(if $(DATA),--data $(DATA))

# the default policy against its rivals, cell by cell and in drawn traffic, and the cells that fall short; goes on where it stopped:
# make cells [DATA=...] [CELLS="--drawn --seeds 0-9"]
cells: $(VENV)/.dev
	$(BIN)/python -m benchmarks.grid $(CELLS) $(if $(DATA),--data $(DATA))

# its times to the first token against the best rivals', in the recorded and scripted cells; likewise: make served-cells [DATA=...]
served-cells: $(VENV)/.dev
	$(BIN)/python -m benchmarks.served_cells $(if $(DATA),--data $(DATA))

# policies in the running server on the same recorded requests, beside the lab's prediction: make served-policies [DATA=...]
served-policies: $(VENV)/.dev
	$(BIN)/python -m benchmarks.served_policies $(if $(DATA),--data $(DATA))

# the papers' figures on recorded traffic, and the page that shows them, in build/: make results [DATA=...] [PEERS=...] [FIGURES=marconi]
# without FIGURES all of them, with those that need an engine; PUBLISH=1 writes the files and the page of docs/ instead
PUBLISHED = $(if $(PUBLISH),docs,build)
results: $(VENV)/.papers
	$(BIN)/python -m papers $(FIGURES) --data $(DATA) --peers $(or $(PEERS),$(DATA)/../peers) --out $(PUBLISHED)/results $(if $(PUBLISH),--publish)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.sparse --data $(DATA) --out $(PUBLISHED)/results)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.segment_states --out $(PUBLISHED)/results)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.segments --out $(PUBLISHED)/results)
	$(if $(FIGURES),,$(BIN)/python -m benchmarks.segment_quality --out $(PUBLISHED)/results)
	$(BIN)/python -m papers --page $(PUBLISHED)/results.md --out $(PUBLISHED)/results $(if $(PUBLISH),--publish)

# generated pages, and numbers in prose, from the code and the results: make pages
pages: $(VENV)/.dev
	$(BIN)/python -m pages

# the page of all families, from the code
families: $(VENV)/.dev
	$(BIN)/python -m benchmarks.families

# the embedded model, from scratch; goes on where an earlier run stopped: make train TEXTS=FOLDER [RECIPE=smoke] [BEGIN=CHECKPOINT]
train: $(VENV)/.dev
	$(BIN)/python -m training --recipe $(or $(RECIPE),cpu) --out build/training-$(or $(RECIPE),cpu) $(if $(TEXTS),--texts $(TEXTS)) $(if $(BEGIN),--begin $(BEGIN))
	$(BIN)/python -m training.curve build/training-$(or $(RECIPE),cpu) build/training-$(or $(RECIPE),cpu)/curve.png

# of the live page, for the docs: needs chromium and chromedriver
screenshot: $(VENV)/.dev
	$(BIN)/python examples/screenshot.py

# random clients against one server, then against two with a tier, one after the other; TIER=1: those two alone
# make soak [SOAK=30m] [DTYPE=bfloat16] [WEIGHTS=int4] [THREADS=3] [SPECULATION=ngram] [TIER=1]
SOAKING = $(BIN)/python -m stress.soak --for $(or $(SOAK),3m)$(if $(DTYPE), --dtype $(DTYPE))$(if $(WEIGHTS), --weights $(WEIGHTS))$(if $(THREADS), --threads $(THREADS))$(if $(SPECULATION), --speculation $(SPECULATION))
soak: $(VENV)/.dev
	$(if $(TIER),,$(SOAKING))
	$(SOAKING) --tier

# 10,000 random requests to four engines, with and without drafts and a cache: make four-ways [REQUESTS=500] [FAMILY=nemotron_h]
four-ways: $(VENV)/.dev
	$(BIN)/python -m stress.four_ways$(if $(REQUESTS), --requests $(REQUESTS))$(if $(FAMILY), --family $(FAMILY))

soak-memory: $(VENV)/.dev
	$(BIN)/python -m stress.memory

tenant-timing: $(VENV)/.dev
	$(BIN)/python -m stress.tenant_timing

fuzz: $(VENV)/.fuzz
	$(BIN)/python -m stress.fuzz --for $(or $(FUZZ),60s) $(TARGETS)

clean:
	rm -rf $(VENV) .clients build dist

# the targets, as CONTRIBUTING.md lists them
help:
	@sed -n 's/^| `\(make[^|]*\) | \(.*\) |$$/\1: \2/p' CONTRIBUTING.md | tr -d '`' | fold -s -w 80
