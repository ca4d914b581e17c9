# `make help` lists what there is. Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PIP    := $(BIN)/pip install --disable-pip-version-check -q

SHELL  := /bin/bash

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint types layers unit docs results format soak clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/; s/[$$][$$]/$$/' | expand -t 10

venv: $(READY)  ## a virtual environment with everything the demo and the tests need

# torch first and by its exact pin: an open range would take the newest build with several GB of CUDA packages.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "$$(grep '^torch==' constraints.txt)"
	$(PIP) -c constraints.txt -e '.[lab,dev]'
	touch $(READY)

demo: $(READY)  ## the main job on embedded data: trains, measures, and writes a page that teaches what flatness is
	$(BIN)/smoothout demo

test: lint types layers unit  ## lint, types, layers and the tests

lint: $(READY)  ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## pyrefly
	$(BIN)/pyrefly check

layers: $(READY)  ## lab uses measure uses the method, never the other way
	$(BIN)/lint-imports

unit: $(READY)  ## the tests alone (real-data tests run where $$SMOOTHOUT_DATA says where the data are)
	$(BIN)/python -m pytest -m "not soak and not gpu" -n 2 --dist loadfile --no-loadscope-reorder

docs: $(READY)  ## the documentation as a site, in site/; the tests run its code blocks
	$(BIN)/mkdocs build --strict

results: $(READY)  ## README's table, docs/results.md, the pictures and the page of results, from the records in results/
	$(BIN)/python results/anew.py

soak: $(READY)  ## the long campaigns; the log of the last run is kept under results/soak/
	mkdir -p results/soak
	set -o pipefail; $(BIN)/python -m pytest -m soak -vv -rP --show-capture=stdout --timeout 3600 2>&1 | sed 's|$(CURDIR)|.|g' | tee results/soak/last.log

format: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove everything that can be made again
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis site build dist
