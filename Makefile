# Two commands: `make demo` and `make test`. Each does all of its own set-up.
SCREENSHOTS := docs/images/console
.PHONY: demo test docs screenshots bench setup format clean

demo: setup
	@.venv/bin/kdskills demo $(ARGS)

test: setup
	@.ci/gates

docs: setup
	@.venv/bin/mkdocs build --quiet && echo site/index.html

screenshots: setup
	@mkdir -p $(SCREENSHOTS) && rm -f $(SCREENSHOTS)/*.png
	@KDSKILLS_SCREENSHOTS=$(CURDIR)/$(SCREENSHOTS) .venv/bin/python -m pytest -q tests/integration/web/ui

bench: setup
	@.venv/bin/kdskills bench $(or $(BENCH),remote)

setup:
	@.ci/setup

format: setup
	@.venv/bin/ruff check --fix --quiet . && .venv/bin/ruff format --quiet .

clean:
	rm -rf .venv .mypy_cache .ruff_cache .hypothesis demo-output site
