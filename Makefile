# make demo   runs the example shop
# make test   everything that is checked: format, lint, types, and the suite on each Python that is found

# An interpreter of one of these versions, on PATH or among pyenv's, that can make environments.
find = $(shell for version in $(1); do \
  for python in python$$version "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/$$version.*/bin/python; do \
    "$$python" -c "import ensurepip, sqlite3, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$$version')" \
      2>/dev/null && command -v "$$python" && exit; \
  done; done)

PYTHON ?= $(call find,3.11 3.12 3.13 3.14)
PORT ?= 8000

# The tests of a suite are shared by so many processes: more than there are cores, since most of them wait.
TESTERS ?= 4

.PHONY: demo test lint suite format clean
.SECONDARY: # keeps the environments

demo: .venv/ready
	@echo
	@echo "The shop is at http://127.0.0.1:$(PORT). From another terminal, try:"
	@echo
	@printf '  %-50s  %s\n' \
	  "curl -X POST '127.0.0.1:$(PORT)/orders?item=teapot'" "place an order; the answer names its job" \
	  "curl 127.0.0.1:$(PORT)/jobs/JOB" "that job's status" \
	  "curl 127.0.0.1:$(PORT)/status" "all jobs, counted" \
	  "cat outbox.txt" "the receipts that were delivered" \
	  ".venv/bin/python examples/crash_demo.py" "kill a shop in the middle of its work, and count"
	@echo
	@echo "Ctrl-C stops it, once its running jobs have ended. Receipts that wait are kept in shop.db."
	@echo
	@.venv/bin/python -m uvicorn --app-dir examples --host 127.0.0.1 --port $(PORT) shop:app

test: lint suite suite-3.12 suite-3.13

lint: .venv/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 .venv/bin/pyright --pythonpath .venv/bin/python

suite: .venv/ready
	.venv/bin/python -m pytest --numprocesses $(TESTERS) --dist worksteal

suite-%:
	@if [ -n "$(call find,$*)" ]; \
	then $(MAKE) --no-print-directory .venv-$*/ready && .venv-$*/bin/python -m pytest --numprocesses $(TESTERS) --dist worksteal; \
	else echo "Python $* was not found: the suite did not run on it."; \
	fi

format: .venv/ready
	.venv/bin/ruff check --fix
	.venv/bin/ruff format

clean:
	rm -rf .venv .venv-* build dist .mypy_cache .pytest_cache .ruff_cache

# An environment is ready when it has been installed since these files last changed.
define install
@test -n "$(1)" || { echo "No Python 3.11 or newer with its venv module was found; name one: make PYTHON=..."; exit 1; }
test -x $(@D)/bin/python || $(1) -m venv $(@D)
$(@D)/bin/python -m pip install --quiet --upgrade pip
$(@D)/bin/python -m pip install --quiet --editable . --group dev
@touch $@
endef

.venv/ready: pyproject.toml hatch_build.py
	$(call install,$(PYTHON))

.venv-%/ready: pyproject.toml hatch_build.py
	$(call install,$(call find,$*))
