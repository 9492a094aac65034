PYTHON := .venv/bin/python
STAMP := .venv/.set-up

.PHONY: setup demo test lint plugins clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt build_scripts/setup.sh
	build_scripts/setup.sh
	@touch $@

demo: setup
	$(PYTHON) -m trtllm_hisparse.demo

test: setup
	$(PYTHON) -m pytest -q

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy trtllm_hisparse

# The CUDA kernels; ARCH=90 builds for one compute capability only.
plugins:
	build_scripts/plugins.sh

# Leaves .venv, which takes minutes to make.
clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find trtllm_hisparse tests -name __pycache__ -type d -prune -exec rm -rf {} +
