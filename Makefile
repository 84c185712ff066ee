# Two commands to know: `make lab` opens the course, `make test` tests it. `make` alone lists the others.
#
# The first call makes .venv, installs the versions of constraints.txt into it and prepares the model.
# Later calls start at once; when pyproject.toml or constraints.txt has changed, the installation is repeated.

# Which Python makes .venv, for example: make lab PYTHON=python3.12
PYTHON ?= python3
# Where else pip looks for torch. On Linux without an NVIDIA GPU, the CPU index named on PyTorch's install page
# saves gigabytes: make lab TORCH_INDEX=<that address>
TORCH_INDEX ?=
# More arguments for JupyterLab, for example: make lab LAB_ARGS="--no-browser --port 9999"
LAB_ARGS ?=
# More arguments for the other commands, for example: make test ARGS="tests/test_loading.py"
ARGS ?=

# The browser of the tests.
CHROMIUM ?= /usr/bin/chromium
export CHROMIUM

BIN := .venv/bin
ifeq ($(OS),Windows_NT)
BIN := .venv/Scripts
endif
RUN := "$(BIN)/python"
STAMP := .venv/installed.stamp
# The lessons' and tests' GPU kernels run on a CPU in Triton's interpreter. A CUDA build of torch brings its own Triton;
# for a CPU build on Linux (there are no packages for other systems) this one is added.
TRITON := triton==3.9.0
NEEDS_TRITON := import importlib.util as u, sys, torch; sys.exit(sys.platform == 'linux' and torch.version.cuda is None and not u.find_spec('triton'))
# Jupyter refuses to run as root (in a container, say) unless told that this is meant.
ALLOW_ROOT := $(if $(filter 0,$(shell id -u 2>/dev/null)),--allow-root)

.PHONY: help lab test test-all browser demo notebooks site site-lessons bench gpu-check doctor audit clean

help:
	@echo "make lab        open the course in JupyterLab, at lesson 00"
	@echo "make test       run all tests but the long ones, which work through lessons in a browser"
	@echo "make test-all   run all tests"
	@echo "make browser    install Chromium for the browser tests, where that can be done"
	@echo "make demo       see the stall, and chunked prefill removing it, in this terminal"
	@echo "make notebooks  build the notebooks from their sources"
	@echo "make site       build the scheduler lab as a static web page, in build/site (needs npm)"
	@echo "make site-lessons  build lesson 08 and some exercises to run in a browser, in build/lessons (needs npm)"
	@echo "make bench      measure the engine on this machine"
	@echo "make gpu-check  test the GPU kernels on this machine's GPU, and measure them"
	@echo "make doctor     say what is installed, what is missing, and what to do about it"
	@echo "make audit      look over versions, licences, secrets, and what the code trusts"
	@echo "make clean      delete .venv and what Python leaves behind"

lab: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(RUN) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks/00_the_stall.ipynb \
		--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(ALLOW_ROOT) $(LAB_ARGS)

test: $(STAMP) browser
	$(RUN) -m pytest -m "not long" $(ARGS)

test-all: $(STAMP) browser
	$(RUN) -m pytest $(ARGS)

# The views are tested in a real JupyterLab in Chromium. Without one those tests are skipped, and say so.
browser:
	@test -x "$(CHROMIUM)" || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && \
		{ echo "Installing Chromium for the browser tests"; apt-get update -qq; apt-get install -y -qq chromium >/dev/null; }; } || \
		echo "No Chromium at $(CHROMIUM): the browser tests will be skipped (sudo apt-get install chromium, or CHROMIUM=path)"

demo: $(STAMP)
	$(RUN) -m course_lib demo $(ARGS)

notebooks: $(STAMP)
	$(RUN) tools/build_notebooks.py $(ARGS)

# Needs npm and Python alone: Pyodide, a Python for browsers, comes from npm once.
site:
	"$(PYTHON)" tools/build_site.py $(ARGS)

site-lessons:
	"$(PYTHON)" tools/build_lessons_site.py

bench: $(STAMP)
	$(RUN) -m course_lib bench $(ARGS)

gpu-check: $(STAMP)
	$(RUN) -m course_lib gpu-check $(ARGS)

doctor: $(STAMP)
	$(RUN) -m course_lib doctor $(ARGS)

audit: $(STAMP)
	$(RUN) tools/audit.py

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	@echo "The converted model stays in your cache folder; \`make doctor\` says where that is."

# The stamp is written last: after an interrupted or failed run the next call starts over with what is there.
# A .venv without a working pip (half-made, or its Python was removed) or with an old Python is made anew.
$(STAMP): pyproject.toml constraints.txt
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
		echo "The course needs Python 3.11 or newer. '$(PYTHON)' is: $$("$(PYTHON)" --version 2>&1)" >&2; \
		echo "Name another one, for example: make lab PYTHON=python3.12" >&2; exit 1; }
	@$(RUN) -c "import sys, pip; sys.exit(sys.version_info < (3, 11))" 2>/dev/null || { echo "Making .venv"; "$(PYTHON)" -m venv --clear .venv; }
	@echo "Installing the course and what it needs (some minutes the first time)"
	$(RUN) -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)") \
		-c constraints.txt -e ".[test]"
	@$(RUN) -c "$(NEEDS_TRITON)" || $(RUN) -m pip install --disable-pip-version-check --no-deps $(TRITON)
	$(RUN) -m course_lib fetch
	@touch $(STAMP)
