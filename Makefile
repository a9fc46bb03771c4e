# Python 3.11 to 3.13, make, and nothing else. Every verb may be run from a clean clone, and again.
#
#   PYTHON=python3.12   the interpreter that .venv is made from
#   TORCH_INDEX=URL     where pip finds torch besides its default index; empty for only the default. Without this
#                       variable tools/torch_index.py chooses, and says what
#   PORT=3000           where `make serve` listens
#   MODEL=NAME          what `make serve` serves: smollm2, a folder, a GGUF file or a hub name; the demo model when empty
#   SUITE="long fuzz"   what `make test-all` runs: long, ecosystem, cluster, fuzz, sanitized, compiled, or several of them
#   WORKERS=2           processes that tests are run in
#   ARGS="--flag ..."   more flags for the launcher, pytest or the benchmark

PYTHON ?= python3
PORT ?= 3000
MODEL ?=
SUITE ?= long ecosystem cluster fuzz sanitized compiled
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
PROTO := proto/millrace_proto/generate.proto
GENERATED := proto/millrace_proto/generate_pb2.py
SUITES := long ecosystem cluster fuzz sanitized compiled
# A file's tests stay in one process, for the servers that they share. Ids of parameters have to be the same in each.
# In the order of collection the few slow tests of whole servers come early, and leave no process alone at the end.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The only ones with tests that are marked so: to collect all others takes longer than to run some of these.
LONG_FOLDERS := $(addprefix tests/,bench/test_adapters.py demo e2e launcher/supervision \
	$(addprefix shard/,adapters invariance kernels/cuda model_runner models structured_output))
WITH_INDEX := PIP_EXTRA_INDEX_URL="$$($(BIN)/python tools/torch_index.py)"
PIP_INSTALL := $(WITH_INDEX) $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt

# Where it is set, as in many images, each of the hundreds of processes of a test run compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve check format test test-all bench bench-quick bench-gpu proto clean
.PHONY: $(SUITES:%=suite-%)
.DEFAULT_GOAL := help

help:
	@echo "make install      .venv with Millrace, editable, and its development tools"
	@echo "make serve        the demo model on port $(PORT); MODEL=smollm2 a real one; PORT= and ARGS= change it"
	@echo "make check        lint, format, types, import contracts"
	@echo "make format       rewrite the sources in house style"
	@echo "make test         the tests that need only Python"
	@echo "make test-all     the other tests; SUITE= picks some: long, ecosystem, cluster, fuzz, sanitized, compiled"
	@echo "make bench        all cases and load levels beside the installed peers, to bench/out"
	@echo "make bench-quick  whether our engine became slower; three minutes"
	@echo "make bench-gpu    a first hour on a GPU: checks and speed in ten minutes; without one, in an interpreter"
	@echo "make proto        regenerate the protobuf code"
	@echo "make clean        remove the files of these verbs, except the environments"

install: $(INSTALLED) $(GENERATED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	"Millrace needs Python 3.11, 3.12 or 3.13, but %s is %d.%d: name another, as in make PYTHON=python3.12" \
	% (sys.executable, *v))'
	$(PYTHON) -m venv --clear .venv

# With torch in place, the build hook compiles the CPU kernels for this machine, and needs no torch of its own.
$(INSTALLED): pyproject.toml constraints.txt proto/compile.py package/build_hook.py shard/compile_kernels.py | $(BIN)/python
	@echo "Installing Millrace into .venv, and compiling its kernels: a few minutes the first time"
	@$(PIP_INSTALL) --quiet torch
	@$(PIP_INSTALL) --quiet -e '.[dev]'
	@touch $@

$(GENERATED): $(PROTO) proto/compile.py | $(INSTALLED)
	$(BIN)/python proto/compile.py
	@touch $@

proto: $(GENERATED)

serve: install
	@exec $(BIN)/millrace-launcher $(if $(MODEL),--model-id $(MODEL)) --port $(PORT) $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: install
	$(PYTEST) -m "not ecosystem and not cluster and not long" $(ARGS)

test-all: $(SUITE:%=suite-%)

suite-%:
	$(error SUITE=$* is not a suite: use $(SUITES))

suite-long: install
	$(PYTEST) -m long $(LONG_FOLDERS) $(ARGS)

suite-sanitized: install
	$(PYTEST) --dist load -m long tests/shard/kernels/cpu/test_sanitizers.py $(ARGS)

suite-compiled: install
	MILLRACE_TEST_CAPABILITIES="80 86 89 90 100 120" MILLRACE_TEST_EVERY=1 $(PYTEST) -m ecosystem \
	tests/shard/kernels/cuda/test_cuda_compilation.py $(ARGS)

suite-ecosystem: install
	export $(WITH_INDEX); compiler="$$(command -v g++)"; $(BIN)/python -m tests.ecosystem.prepare && \
	$(PYTEST) -m ecosystem tests/ecosystem tests/shard/kernels $(ARGS) && \
	if [ -z "$$compiler" ]; then $(PYTEST) -m "not long" tests/shard/kernels/cpu $(ARGS); fi

# Hosts are network namespaces of this machine; without root it says so and ends well.
suite-cluster: install
	@$(PIP_INSTALL) --quiet -e '.[dev,ray]' || echo "Ray cannot be installed: its tests are skipped"
	$(BIN)/python -m pytest -m cluster -rs tests/cluster $(ARGS)

# What `make test` tries some hundred times, up to a hundred thousand times; and the official JSON-Schema-Test-Suite,
# whose cases come only with the source distribution of jsonschema.
suite-fuzz: install
	MILLRACE_RESIDENCY_HISTORIES=100000 $(BIN)/python -m pytest tests/router/adapters/test_residency.py $(ARGS)
	MILLRACE_KV_EVENT_OPERATIONS=100000 $(BIN)/python -m pytest tests/router/kv_events $(ARGS)
	PYTHONPATH=tests/support $(BIN)/python -m millrace_testing.adapters.fuzz_files 100000
	PYTHONPATH=tests/support $(BIN)/python -m millrace_testing.quantized.fuzz_checkpoints 10000
	PYTHONPATH=tests/support $(BIN)/python -m millrace_testing.router.fuzz_images 10000
	@rm -rf bench/out/json-schema
	$(BIN)/python -m pip download --quiet --no-deps --no-binary jsonschema -d bench/out/json-schema jsonschema
	tar -xzf bench/out/json-schema/jsonschema-*.tar.gz -C bench/out/json-schema --strip-components=1
	JSON_SCHEMA_TEST_SUITE=bench/out/json-schema/json/tests/draft2020-12 \
	$(BIN)/python -m pytest tests/shard/structured_output/test_json_schema.py $(ARGS)
	$(BIN)/python -m pytest tests/e2e/verify_architectures.py $(ARGS)

bench: install
	$(BIN)/python -m bench $(ARGS)

bench-quick: install
	$(BIN)/python -m bench.quick $(ARGS)

# It changes no installed packages, so that it runs from a plain checkout with torch in $(PYTHON). Protobuf code comes from
# the compiler; without it, the stages that need it fail, and the others run.
bench-gpu:
	-@test -e $(GENERATED) || $(PYTHON) proto/compile.py
	@$(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON)) -m bench.gpu $(ARGS)

clean:
	find proto router shard launcher package cluster tests bench demo tools -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -rf build dist bench/out bench/models .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f proto/millrace_proto/*_pb2.py proto/millrace_proto/*_pb2.pyi proto/millrace_proto/*_pb2_grpc.py proto/millrace_proto/*_pb2_grpc.pyi
