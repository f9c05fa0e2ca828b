# `make run` and `make test` are all it takes. Both set up what they need, say so, and work offline from then on.
# ARGS goes to the command that is run: make run ARGS=--once, make test ARGS="-k queue".

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The interpreter of the virtual environment: the first of these that is 3.11 or later. Override with PYTHON=...
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
ARGS ?=

BIN := .venv/bin
# What is installed follows from the content of pyproject.toml and proto/requirements.txt, not from their dates.
INSTALLED_RUN := .venv/.run-$(shell cksum < pyproject.toml | cut -d ' ' -f 1)
INSTALLED_DEV := .venv/.dev-$(shell cksum < pyproject.toml | cut -d ' ' -f 1)
INSTALLED_BENCH := .venv/.bench-$(shell cksum < pyproject.toml | cut -d ' ' -f 1)
INSTALLED_HELM := .venv/.helm-$(shell cksum < .ci/fetch_helm.py | cut -d ' ' -f 1)
INSTALLED_GEN := .venv-gen/.gen-$(shell cksum < proto/requirements.txt | cut -d ' ' -f 1)
pip = $(1)/python -m pip install -q --disable-pip-version-check $(2) && \
  echo "==> installed: $$($(1)/python -m pip list --format=freeze --exclude-editable | xargs)"
BENCHES = $(patsubst bench/%.py,bench-%,$(shell grep -l '__main__' bench/*.py))

.PHONY: help
help: ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /|/' | awk -F '|' '{ printf "  make %-12s %s\n", $$1, $$2 }'
	@echo '  make bench-NAME   Run one of bench/ with ARGS: $(patsubst bench-%,%,$(BENCHES))'

.PHONY: run
run: $(INSTALLED_RUN) ## Play the demo: control plane, emulated engines, a mixed rollout; serves until Ctrl-C
	@$(BIN)/python -m bench.demo $(ARGS)

.PHONY: test
test: $(INSTALLED_DEV) $(INSTALLED_HELM) tools $(if $(CI),toolchains) ## Run all tests, real Redis included
	$(BIN)/python -m pytest $(ARGS)

.PHONY: lint lint-style lint-types lint-api lint-lua
lint: lint-style lint-types lint-api proto-check stubs-check lint-lua ## Check style, types, protos, stubs and Lua scripts
lint-style: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
lint-types: $(INSTALLED_DEV)
	$(BIN)/mypy
lint-api: $(INSTALLED_DEV)
	$(BIN)/buf lint proto
lint-lua: $(INSTALLED_DEV) tools
	$(BIN)/python -m pytest -q tests/contract/test_lua_scripts.py

.PHONY: proto
proto: $(INSTALLED_GEN) ## Generate client/moorage/v1 from proto/, with the oldest generator supported
	PYTHON=$(CURDIR)/.venv-gen/bin/python proto/generate.sh

.PHONY: proto-check
proto-check: $(INSTALLED_GEN) ## Fail where client/moorage/v1 is not what proto/ generates
	@out=$$(mktemp -d) && trap 'rm -rf "$$out"' EXIT && \
	PYTHON=$(CURDIR)/.venv-gen/bin/python proto/generate.sh "$$out" >/dev/null 2>"$$out/log" || { cat "$$out/log" >&2; exit 1; }; \
	if diff -r -x __init__.py -x __pycache__ "$$out/moorage/v1" client/moorage/v1; \
	then echo 'generated code is up to date'; \
	else echo 'error: client/moorage/v1 is stale: run `make proto`' >&2; exit 1; fi

.PHONY: stubs
stubs: $(INSTALLED_DEV) proto ## Generate the stubs of Python, Go, Rust and TypeScript
	@PYTHON=$(CURDIR)/.venv-gen/bin/python PYTHONPATH=. $(BIN)/python .ci/stubs.py

.PHONY: stubs-check
stubs-check: $(INSTALLED_DEV) $(INSTALLED_GEN) $(if $(CI),toolchains) ## Fail where the stubs of Go, Rust or TypeScript are stale
	@PYTHON=$(CURDIR)/.venv-gen/bin/python PYTHONPATH=. $(BIN)/python .ci/stubs.py --check

.PHONY: chart-docs
chart-docs: $(INSTALLED_DEV) ## Write the table of values in the chart's README
	@$(BIN)/python .ci/chart_docs.py --write

.PHONY: setup
setup: $(INSTALLED_DEV) $(INSTALLED_GEN) $(INSTALLED_HELM) tools ## Install everything that the other targets need

.PHONY: clean
clean: ## Remove the virtual environments and caches
	rm -rf .venv .venv-gen .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

bench-dispatch bench-peers bench-processes bench-proxy bench-real bench-rpc: | redis
bench-ablation bench-shifts: $(INSTALLED_BENCH)
bench-%: bench/%.py $(INSTALLED_RUN)
	@$(BIN)/python -m bench.$* $(ARGS)

.PHONY: tools toolchains redis
# What can not be had fails the tests of its language, and no others.
toolchains: $(INSTALLED_DEV) ## Install what builds and tests the stubs in other languages
	-@PYTHONPATH=. $(BIN)/python .ci/toolchains.py
tools:
	@.ci/debian-packages redis-server=redis-server luacheck=lua-check
redis:
	@.ci/debian-packages redis-server=redis-server

$(INSTALLED_RUN): | .venv/bin/python
	@echo '==> installing moorage and what it needs to serve into .venv'
	@$(call pip,$(BIN),-e '.[server]')
	@touch $@

$(INSTALLED_BENCH): | .venv/bin/python
	@echo '==> installing what sweeps and plots need into .venv'
	@$(call pip,$(BIN),-e '.[bench]')
	@touch $@

$(INSTALLED_DEV): | .venv/bin/python
	@echo '==> installing moorage and its development tools into .venv'
	@$(call pip,$(BIN),-e '.[dev]')
	@touch $@ $(INSTALLED_RUN) $(INSTALLED_BENCH)

# Without helm, tests of the chart are skipped, except in CI, where they fail.
$(INSTALLED_HELM): | .venv/bin/python
	@echo '==> fetching helm into .venv'
	@if $(BIN)/python .ci/fetch_helm.py $(BIN)/helm; then touch $@; else echo 'warning: the chart stays untested' >&2; fi

$(INSTALLED_GEN): | .venv-gen/bin/python
	@echo '==> installing the oldest supported generator of the stubs into .venv-gen'
	@$(call pip,.venv-gen/bin,-r proto/requirements.txt)
	@touch $@

%/bin/python:
	@[ -n '$(PYTHON)' ] || { echo 'error: no Python 3.11 or later found; name one with PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || .ci/debian-packages no-ensurepip=$(notdir $(PYTHON))-venv
	@echo '==> creating $* with $(PYTHON)'
	@$(PYTHON) -m venv --clear $*
