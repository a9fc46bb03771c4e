# Python 3.11 to 3.13, make, and nothing else. Every verb may be run from a clean clone, and again.
#
#   PYTHON=python3.12   the interpreter that .venv is made from
#   TORCH_INDEX=URL     one more package index for pip; name PyTorch's CPU index here, where the
#                       default index would bring the CUDA build of torch (pip's own
#                       PIP_EXTRA_INDEX_URL and PIP_FIND_LINKS work as well)
#   PORT=3000           where `make serve` listens
#   MODEL=NAME          what `make serve` serves: smollm2, a folder, a GGUF file or a hub name; the demo model when empty
#   WORKERS=2           processes that tests are run in
#   ARGS="--flag ..."   more flags for the launcher, pytest or the benchmark

PYTHON ?= python3
TORCH_INDEX ?=
PORT ?= 3000
MODEL ?=
WORKERS ?= 2
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
PROTO := proto/millrace_proto/generate.proto
GENERATED := proto/millrace_proto/generate_pb2.py
# A file's tests stay in one process, for the servers that they share. Ids of parameters have to be the same in each.
# In the order of collection the few slow tests of whole servers come early, and leave no process alone at the end.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
WITH_INDEX := $(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL="$(TORCH_INDEX) $$PIP_EXTRA_INDEX_URL")
PIP_FLAGS := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Where it is set, as in many images, each of the hundreds of processes of a test run compiles the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install serve test test-long test-ecosystem test-cluster test-residency test-kv-events test-json-schema fuzz-adapters fuzz-checkpoints check format verify bench bench-quick bench-curves bench-gpu chaos proto clean
.DEFAULT_GOAL := help

help:
	@echo "make install          .venv with Millrace, editable, and its development tools"
	@echo "make serve            the demo model on port $(PORT); MODEL=smollm2 a real one; PORT= and ARGS= change it"
	@echo "make check            lint, format, types, import contracts"
	@echo "make test             the tests that need Python alone"
	@echo "make test-long        a campaign of faults, experiments, and further cases of what make test checks"
	@echo "make test-ecosystem   the tests against Prometheus, real clients and a C++ compiler"
	@echo "make test-cluster     a model over several hosts, which are network namespaces; needs root"
	@echo "make test-json-schema the official JSON-Schema-Test-Suite, from the package index"
	@echo "make test-residency   a hundred thousand random histories of adapters in the shards' memory"
	@echo "make test-kv-events   a hundred thousand random operations, followed by their KV-cache events"
	@echo "make fuzz-adapters    mutate the files of LoRA adapters a hundred thousand times; some minutes"
	@echo "make fuzz-checkpoints mutate quantised checkpoints and GGUF files ten thousand times; some minutes"
	@echo "make verify           output does not depend on the batch composition: demo model, every architecture"
	@echo "make bench            all cases and load levels beside the installed peers, to bench/out"
	@echo "make bench-quick      whether our engine became slower; three minutes"
	@echo "make bench-curves     throughput over concurrency and context length, to bench/out"
	@echo "make bench-gpu        a first hour on a GPU: checks and speed in ten minutes; without one, in an interpreter"
	@echo "make chaos            break the server 100 times under load, and audit it; a quarter of an hour"
	@echo "make format           rewrite the sources in house style"
	@echo "make proto            regenerate the protobuf code"
	@echo "make clean            remove the files of these verbs, except the environments"

install: $(INSTALLED) $(GENERATED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else \
	"Millrace needs Python 3.11, 3.12 or 3.13, but %s is %d.%d: name another, as in make PYTHON=python3.12" \
	% (sys.executable, *v))'
	$(PYTHON) -m venv --clear .venv

$(INSTALLED): pyproject.toml constraints.txt proto/compile.py | $(BIN)/python
	@echo "Installing Millrace into .venv: a few minutes the first time"
	@test -t 1 || quiet=--quiet; \
	$(BIN)/python -m pip install $$quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(GENERATED): $(PROTO) proto/compile.py | $(INSTALLED)
	$(BIN)/python proto/compile.py
	@touch $@

proto: $(GENERATED)

serve: install
	@exec $(BIN)/millrace-launcher $(if $(MODEL),--model-id $(MODEL)) --port $(PORT) $(ARGS)

test: install
	$(PYTEST) -m "not ecosystem and not cluster and not long" $(ARGS)

# The folders that have such tests: to collect all others takes longer than to run some of these.
test-long: install
	$(PYTEST) -m long tests/bench/adapters tests/e2e tests/shard/kernels/cuda $(ARGS)

test-ecosystem: install
	$(WITH_INDEX) $(BIN)/python -m tests.ecosystem.prepare
	$(WITH_INDEX) $(PYTEST) -m ecosystem tests/ecosystem tests/shard/kernels/cuda $(ARGS)
	$(PYTEST) tests/shard/kernels --ignore=tests/shard/kernels/cuda $(ARGS)

# Hosts are network namespaces of this machine; without root it says so and ends well.
test-cluster: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev,ray]' || \
	echo "Ray cannot be installed: its tests are skipped"
	$(BIN)/python -m pytest -m cluster -rs tests/cluster $(ARGS)

# A hundred thousand random histories of adapters in the shards' memory, where `make test` runs some hundreds.
test-residency: install
	MILLRACE_RESIDENCY_HISTORIES=100000 $(BIN)/python -m pytest tests/router/adapters/test_residency.py $(ARGS)

# A hundred thousand random operations on the prefix cache, where `make test` runs three thousand.
test-kv-events: install
	MILLRACE_KV_EVENT_OPERATIONS=100000 $(BIN)/python -m pytest tests/router/kv_events $(ARGS)

fuzz-adapters: install
	PYTHONPATH=tests/support $(BIN)/python -m millrace_testing.adapters.fuzz_files 100000

fuzz-checkpoints: install
	PYTHONPATH=tests/support $(BIN)/python -m millrace_testing.quantized.fuzz_checkpoints 10000

# Its cases come with the source distribution of jsonschema, and only with that.
test-json-schema: install
	@rm -rf bench/out/json-schema
	$(BIN)/python -m pip download --quiet --no-deps --no-binary jsonschema -d bench/out/json-schema jsonschema
	tar -xzf bench/out/json-schema/jsonschema-*.tar.gz -C bench/out/json-schema --strip-components=1
	JSON_SCHEMA_TEST_SUITE=bench/out/json-schema/json/tests/draft2020-12 \
	$(BIN)/python -m pytest tests/shard/structured_output/test_json_schema.py $(ARGS)

verify: install
	$(BIN)/python -m pytest tests/e2e/verify_architectures.py $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: install
	$(BIN)/python -m bench $(ARGS)

bench-quick: install
	$(BIN)/python -m bench.quick $(ARGS)

bench-curves: install
	$(BIN)/python -m bench.curves $(ARGS)

# It changes no installed packages, so that it runs from a plain checkout with torch in $(PYTHON). Protobuf code comes from
# the compiler; without it, the stages that need it fail, and the others run.
bench-gpu:
	-@test -e $(GENERATED) || $(PYTHON) proto/compile.py
	@$(if $(wildcard $(INSTALLED)),$(BIN)/python,$(PYTHON)) -m bench.gpu $(ARGS)

chaos: install
	$(BIN)/python -m bench.faults.chaos $(ARGS)

clean:
	find proto router shard launcher package cluster tests bench demo -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
	rm -rf build dist bench/out bench/models .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f proto/millrace_proto/*_pb2.py proto/millrace_proto/*_pb2.pyi proto/millrace_proto/*_pb2_grpc.py proto/millrace_proto/*_pb2_grpc.pyi
