# Two commands: `make demo` and `make test`. Each does all of its own set-up.
.PHONY: demo test docs bench setup format clean

demo: setup
	@.venv/bin/kdskills demo $(ARGS)

test: setup
	@.ci/gates

docs: setup
	@.venv/bin/mkdocs build --quiet && echo site/index.html

bench: setup
	@.venv/bin/kdskills bench $(or $(BENCH),remote)

setup:
	@.ci/setup

format: setup
	@.venv/bin/ruff check --fix --quiet . && .venv/bin/ruff format --quiet .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis demo-output site
