# Everything runs from the checkout in .venv; its dependencies are shared through the user's cache (.ci/environment).
# make PYTHON=python3.12 ... takes another interpreter.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv/bin/python

.PHONY: help environment test check demo bench corpus clean

help:  ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

environment:  ## Create .venv, or do nothing when it is up to date
	@PYTHON="$(PYTHON)" .ci/environment

test: environment  ## Run the test suite (no network, no torch)
	$(VENV) -m pytest

check: environment  ## Lint and type-check
	$(VENV) -m ruff check .
	$(VENV) -m mypy

demo: environment  ## Quantize a real DINOv2 on photographs: table, figures and a picture in out/
	$(VENV) -m examples.dinov2_saliency

bench: environment  ## List the benchmarks and how to run each
	@$(VENV) -m benchmarks

corpus: environment  ## Sweep a corpus folder: make corpus ATTNQUANT_CORPUS=FOLDER
	@[ -n "$(ATTNQUANT_CORPUS)" ] || { echo "corpus: name the folder: make corpus ATTNQUANT_CORPUS=FOLDER" >&2; exit 1; }
	ATTNQUANT_CORPUS="$(ATTNQUANT_CORPUS)" $(VENV) -m pytest tests/test_corpus_*.py

clean:  ## Remove .venv and the caches of the tools; the shared environments stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build out
