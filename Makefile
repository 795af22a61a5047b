# `make demo` and `make test` are all a newcomer needs; both create .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
WORKERS ?= 2

.PHONY: demo test test-slow lint pictures drift loop methods digits pace speed executions noise downstream clean

.venv/.installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

demo: .venv/.installed
	rm -rf runs/demo
	$(BIN)/dyrep train --out runs/demo --device cpu
	$(BIN)/dyrep inspect runs/demo
	$(BIN)/dyrep deploy runs/demo -o runs/demo/deployed.safetensors
	$(BIN)/dyrep report runs/demo -o runs/demo/report.html

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest -m "not slow" -n $(WORKERS)

test-slow: .venv/.installed
	$(BIN)/python -m pytest -m slow -n $(WORKERS)

pictures: demo   # the figures in the README and in docs/results.md
	cp runs/demo/report-figures/timeline-1.png docs/timeline.png
	$(BIN)/dyrep draw runs/demo conv6 -o docs/block.png
	$(BIN)/python benchmarks/gains.py --out docs/gains.png

drift: .venv/.installed   # the table in docs/numerics.md
	$(BIN)/python benchmarks/drift.py --out results/drift.json
	$(BIN)/python benchmarks/tables.py

loop: .venv/.installed   # the table of speeds in docs/training.md; needs a GPU
	$(BIN)/python benchmarks/loop.py --out results/loop.json
	$(BIN)/python benchmarks/tables.py

methods: .venv/.installed   # the table of costs in docs/methods.md
	$(BIN)/python benchmarks/methods.py --out results/methods.json
	$(BIN)/python benchmarks/tables.py

digits: .venv/.installed   # the table of accuracies in docs/methods.md
	$(BIN)/python benchmarks/digits.py --out results/digits.json
	$(BIN)/python benchmarks/tables.py

pace: .venv/.installed   # the table of angles in docs/methods.md
	$(BIN)/python benchmarks/pace.py --out results/pace.json
	$(BIN)/python benchmarks/tables.py

speed: .venv/.installed   # the tables of times in docs/speed.md; needs a GPU
	$(BIN)/python benchmarks/speed.py --profile --out results/speed.json
	$(BIN)/python benchmarks/tables.py

executions: .venv/.installed   # the table of accuracies in docs/speed.md; needs a GPU and CIFAR-10 in DATA
	$(BIN)/python benchmarks/arms.py executions --data $(DATA) --out results/executions.json
	$(BIN)/python benchmarks/tables.py

downstream: .venv/.installed   # the table in docs/downstream.md; needs a GPU and tiny-imagenet-100, BCCD, CamVid in DATA
	$(BIN)/python benchmarks/downstream.py --data $(DATA) --workers 4 --out results/downstream.json
	$(BIN)/python benchmarks/tables.py

noise: .venv/.installed   # the table of scores in docs/results.md; needs CIFAR-10 in DATA
	$(BIN)/python benchmarks/noise.py --data $(DATA) --steps 40 --batches 4 --out results/noise.json
	$(BIN)/python benchmarks/tables.py

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
