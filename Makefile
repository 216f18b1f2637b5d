# Every target makes .venv and installs what it needs when that is missing. `make help` lists the targets.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
RUN := OMP_WAIT_POLICY=PASSIVE $(BIN)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow check format lint types imports results contract finetune study docs clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-10s %s\n", $$1, $$2}'

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11 or newer, or make ... PYTHON=path"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11: make ... PYTHON=path of a newer one"; exit 2; }
	$(PYTHON) -m venv .venv

# A stamp a set of extras: pip runs again only when the dependencies or the native kernels may have changed.
.venv/.installed-%: pyproject.toml setup.py $(wildcard src/lineattn/ops/native/csrc/*) | .venv/bin/python
	@echo "installing lineattn[$*] and what it needs into .venv (a few minutes, once)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$*]"
	@touch $@

demo: .venv/.installed-demo ## train plain, MRLA-light and KCLA ResNets on small real images; table and report (a minute)
	$(RUN)/lineattn demo

test: .venv/.installed-dev ## all tests and doctests but the slow ones
	$(RUN)/pytest -q -n 2 --dist worksteal -m "not slow"

test-slow: .venv/.installed-dev ## what takes minutes or hours: training, runs killed ten times, all cells of the contract
	$(RUN)/pytest -q -m slow

check: lint types imports ## format, lint, types, import contract, fast tests, doctests
	$(RUN)/pytest -q -n 2 --dist worksteal -m "not slow and not medium"

format: .venv/.installed-dev ## write the format, and mend what the linter can mend
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lint: .venv/.installed-dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/python tools/readme_tables.py --check
	$(BIN)/python tools/methods_page.py --check

types: .venv/.installed-dev
	$(BIN)/pyright

imports: .venv/.installed-dev
	$(BIN)/lint-imports

# No tracked file changes before all have noted the commit that they measure.
results: .venv/.installed-dev ## measure again what the README's tables show, and write them (ten minutes, idle machine)
	rm -rf runs/results
	$(RUN)/lineattn demo --out runs/results
	for subject in depth scan memory decode; do $(RUN)/lineattn bench $$subject --out runs/results || exit; done
	$(RUN)/lineattn analyze conditions --out runs/results
	cp runs/results/bench_*.json runs/results/conditions.json results/
	cp runs/results/conditions.png docs/
	cp runs/results/results.json results/demo.json
	$(BIN)/python tools/readme_tables.py

docs: .venv/.installed-dev ## write the pages of docs/ that come from the code
	$(BIN)/python tools/methods_page.py
	$(BIN)/python tools/support_table.py

contract: .venv/.installed-dev ## the contract of the methods on the families of networks, and its table in docs/ (ten minutes)
	$(RUN)/pytest -q -n 2 --dist worksteal -m "not slow" tests/test_contract*.py --junitxml=runs/contract.xml
	$(BIN)/python tools/contract_table.py runs/contract.xml

# DATA is a folder of images; the numbers in results/ are of ../shared/data/tiny_imagenet100.
finetune: .venv/.installed-dev ## KCLA attached to a trained trunk, from both starts: results/finetune.json (15 minutes)
	rm -rf runs/finetune
	$(RUN)/lineattn fit cls --config recipes/finetune/trunk.yaml --data.root $(DATA) --out runs/finetune/trunk
	$(RUN)/lineattn validate cls --ckpt_path runs/finetune/trunk/checkpoints/last.ckpt --data.root $(DATA)
	$(RUN)/lineattn sweep --config recipes/finetune/kcla.yaml --data.root $(DATA) --out runs/finetune/starts \
		--model.trunk runs/finetune/trunk/checkpoints/last.ckpt --grid model.init=identity,paper --seeds 1,2,3
	$(BIN)/python tools/finetune.py runs/finetune
	$(BIN)/python tools/readme_tables.py

# DATA is a tar of CIFAR-10's images, for STUDY=kvasir a folder of images and masks; results/study_*.json are of
# ../shared/data/cifar10/cifar10_jpeg_60k.tar.xz and ../shared/data/kvasir_seg_mini.
STUDY ?= depth
study: .venv/.installed-dev ## a small study, STUDY=depth, sample, kvasir, mqar or metala: results/study_*.json (an hour or two; goes on where it stopped)
	$(if $(filter depth sample,$(STUDY)),$(BIN)/python tools/study_data.py $(DATA) runs/study/data)
	$(RUN)/python tools/study.py $(STUDY) runs/study/$(STUDY) \
		$(if $(filter depth sample,$(STUDY)),--images runs/study/data) $(if $(filter kvasir,$(STUDY)),--images $(DATA))

clean: ## remove what was built, .venv too; runs/ stays
	rm -rf .venv build dist .pytest_cache .ruff_cache .import_linter_cache src/lineattn/ops/native/*.so
	find src tests tools \( -name __pycache__ -o -name '*.egg-info' \) -prune -exec rm -rf {} +
