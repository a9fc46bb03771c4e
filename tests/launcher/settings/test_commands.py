"""The children read the launcher's settings back exactly."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from millrace_launcher.errors import NotEnoughCUDADevices
from millrace_launcher.host.threads import ThreadPlan
from millrace_launcher.logs import log
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.flags import all_flags
from millrace_launcher.settings.prepare import prepare
from millrace_router.config import RouterConfig
from millrace_shard.config import ShardConfig

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDER = Path(f"/hub/snapshots/{COMMIT}")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in all_flags():
        monkeypatch.delenv(flag.variable, raising=False)


def commands(argv: str, environ: dict[str, str] | None = None, num_shard: int = 2) -> Commands:
    settings = read_settings(argv.split())
    return Commands(
        settings=settings,
        model_id="a/b",
        model_name="a/b",
        num_shard=num_shard,
        shard_uds_path=settings.launcher.shard_uds_path,
        master_port=settings.shard.master_port,
        threads=ThreadPlan(3, {"OMP_NUM_THREADS": "3"}),
        environ={} if environ is None else environ,
    )


def test_the_router_reads_its_settings_from_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    command = commands(
        "--port=81 --cors-allow-origin=a --cors-allow-origin=b --max-total-tokens=99 --max-input-length=9"
        " --disable-grammar-support --api-key=-x --shard-uds-path=/s/x --json-output --trust-remote-code"
    ).router(FOLDER)
    for name, value in command.environment.items():
        monkeypatch.setenv(name, value)
    config = RouterConfig.from_args(command.argv[3:])
    assert config.port == 81
    assert config.cors_allow_origin == ("a", "b")
    assert (config.max_input_tokens, config.max_total_tokens) == (9, 99)
    assert config.disable_grammar_support
    assert config.trust_remote_code
    assert config.json_output
    assert config.api_key == "-x"
    assert config.shard_addresses == ("unix:/s/x-0", "unix:/s/x-1")
    assert (config.model_folder, config.model_id, config.revision) == (FOLDER, "a/b", COMMIT)


def test_more_adapters_than_one_argument_holds_are_read_back() -> None:
    given = [f"adapter-{number}=/adapters/adapter-{number}" for number in range(5000)]
    command = commands(" ".join(f"--lora-modules={each}" for each in given)).router(FOLDER)
    assert max(len(argument) for argument in command.argv) < 131_072
    assert RouterConfig.from_args(command.argv[3:]).lora_modules == tuple(given)


def test_a_router_looks_for_plugins_of_pydantic_only_where_the_user_says_so() -> None:
    name = "PYDANTIC_DISABLE_PLUGINS"
    assert commands("").router(FOLDER).environment[name] == "__all__"
    assert commands("", {name: "a"}).router(FOLDER).environment[name] == "a"


def test_traces_of_router_and_shards_go_to_one_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    command = commands("--otlp-endpoint=http://c:4318")
    router = RouterConfig.from_args(command.router(FOLDER).argv[3:])
    shard = ShardConfig.from_args(command.shard(0, FOLDER).argv[4:])
    assert router.trace_target is not None
    assert (shard.otlp_endpoint, shard.otlp_protocol) == (
        router.trace_target.endpoint,
        router.trace_target.protocol,
    )
    assert shard.otlp_service_name is None
    named = commands("--otlp-endpoint=http://c --otlp-service-name=mill").shard(0, FOLDER)
    assert ShardConfig.from_args(named.argv[4:]).otlp_service_name == "mill"
    assert ShardConfig.from_args(commands("").shard(0, FOLDER).argv[4:]).otlp_endpoint is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://e:4317")
    of_environment = commands("").shard(0, FOLDER)
    assert ShardConfig.from_args(of_environment.argv[4:]).otlp_endpoint == "http://e:4317"


def test_a_shard_reads_its_settings_from_its_command() -> None:
    command = commands("--dtype=float32 --kv-memory=2G --cuda-graphs=0 --deterministic=off").shard(
        1, FOLDER
    )
    assert command.argv[3] == "serve"
    config = ShardConfig.from_args(command.argv[4:])
    assert (config.rank, config.world_size) == (1, 2)
    assert config.socket_path == Path("/tmp/text-generation-server-1")
    assert config.model_folder == FOLDER
    assert (config.dtype, config.kv_memory, config.deterministic) == (
        "float32",
        2_000_000_000,
        "off",
    )
    assert config.cuda_graphs == ()
    assert config.cpu_threads == 3
    assert command.environment["OMP_NUM_THREADS"] == "3"


def test_both_planes_get_one_folder_of_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_CACHE", "/cache")
    for flags, folder in (
        ("--lora-adapters=a,b=c", "/cache/adapters"),
        ("--enable-lora --adapter-cache=/d", "/d"),
    ):
        given = commands(flags)
        shard = ShardConfig.from_args(given.shard(0, FOLDER).argv[4:])
        router = RouterConfig.from_args(given.router(FOLDER).argv[3:])
        assert shard.enable_lora
        assert (shard.adapter_cache, router.adapter_cache) == (Path(folder), Path(folder))
    plain = commands("")
    shard = ShardConfig.from_args(plain.shard(0, FOLDER).argv[4:])
    assert (shard.enable_lora, shard.adapter_cache) == (False, None)


def test_adapters_reach_the_router_unchanged() -> None:
    modules = '{"name":"a","path":"/b,c"}'
    argv = commands(f"--lora-adapters=a,b=c@d --lora-modules {modules} e=/f").router(FOLDER).argv
    config = RouterConfig.from_args(argv[3:])
    assert config.lora_adapters == ("a", "b=c@d")
    assert config.lora_modules == (modules, "e=/f")


def test_children_use_the_sockets_and_the_port_that_were_claimed() -> None:
    claimed = replace(commands(""), shard_uds_path="/private/shard", master_port=4321)
    config = ShardConfig.from_args(claimed.shard(1, FOLDER).argv[4:])
    assert (config.socket_path, config.master_port) == (Path("/private/shard-1"), 4321)
    assert (
        "--shard-addresses=unix:/private/shard-0,unix:/private/shard-1"
        in claimed.router(FOLDER).argv
    )
    assert claimed.guard().argv[-1] == "/private/shard-1"


def test_the_guard_gets_no_key_and_what_python_needs() -> None:
    kept = {"PATH": "/bin", "PYTHONPATH": "/src", "LD_LIBRARY_PATH": "/lib", "LC_ALL": "C.UTF-8"}
    keys = {
        "API_KEY": "a",
        "ADMIN_KEY": "b",
        "NGROK_AUTHTOKEN": "c",
        "HF_TOKEN": "d",
        "AWS_SECRET_ACCESS_KEY": "e",
    }
    assert commands("", kept | keys).guard().environment == kept


def test_the_hostname_reaches_the_router_unchanged() -> None:
    assert "--hostname=127.0.0.2" in commands("--hostname=127.0.0.2").router(FOLDER).argv


def test_defaults_are_not_repeated() -> None:
    argv = commands("", num_shard=1).shard(0, FOLDER).argv
    assert argv[4:] == ("--cpu-threads=3", "--json-output", str(FOLDER))


def test_a_draft_model_is_downloaded_and_handed_on_as_a_folder() -> None:
    given = commands("--draft-model=org/draft --speculate=3")
    assert "--draft-model=org/draft" in given.download().argv
    config = ShardConfig.from_args(given.shard(0, FOLDER, Path("/hub/draft")).argv[4:])
    assert (config.draft_model, config.speculate) == ("/hub/draft", 3)
    without = ShardConfig.from_args(commands("").shard(0, FOLDER).argv[4:])
    assert (without.draft_model, without.speculate) == (None, None)


@pytest.mark.parametrize(("name", "resolved"), [("org/head", "/hub/head"), ("mtp", "mtp")])
def test_a_speculator_is_resolved_and_handed_on_as_what_drafts(name: str, resolved: str) -> None:
    given = commands(f"--speculator={name}")
    assert f"--draft-model={name}" in given.download().argv
    config = ShardConfig.from_args(given.shard(0, FOLDER, Path(resolved)).argv[4:])
    assert (config.draft_model, config.speculator) == (resolved, None)


def test_two_flags_that_name_what_drafts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        commands("--speculator=org/head --draft-model=org/draft")
    assert "both name what drafts: give one of them" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tokenizer-name=org/tokenizer", "--mmproj=off"])
def test_only_the_download_gets_the_names_of_other_files(flag: str) -> None:
    given = commands(flag)
    assert flag in given.download().argv
    for child in (given.shard(0, FOLDER), given.router(FOLDER)):
        assert not any(flag.partition("=")[0] in option for option in child.argv)


def test_a_router_whose_ranks_are_elsewhere_downloads_no_weights() -> None:
    assert "--without-weights" in commands("--remote-shards=127.0.0.1:9000").download().argv
    assert "--without-weights" not in commands("").download().argv


def test_hub_variables_reach_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HF_API_TOKEN": "t", "PATH": "/bin", "PORT": "3", "WEIGHTS_CACHE_OVERRIDE": "/w"}
    command = commands("--huggingface-hub-cache=/c --revision=v1", environ).download()
    assert command.environment["HF_TOKEN"] == "t"
    assert (
        command.environment["HF_HUB_CACHE"] == command.environment["HUGGINGFACE_HUB_CACHE"] == "/c"
    )
    assert command.environment["WEIGHTS_CACHE_OVERRIDE"] == "/w"
    assert command.environment["PATH"] == "/bin"
    assert "PORT" not in command.environment
    assert command.argv[3:] == ("download-weights", "a/b", "--json-output", "--revision=v1")


def test_a_bar_gets_the_progress_of_a_download_more_often_than_a_log() -> None:
    assert "--progress-seconds=0.5" in commands("").download(has_bar=True).argv
    assert not [word for word in commands("").download().argv if "progress" in word]


NVIDIA_SMI = """#!/bin/sh
echo NVIDIA H100
echo NVIDIA H100
"""


SHARD = """import json, os
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
names = ["NVIDIA H100"] * (2 if visible is None else len([one for one in visible.split(",") if one]))
print(json.dumps({"names": names, "problem": None if names else "torch sees no CUDA device"}))
"""
UNUSABLE = """import json
print(json.dumps({"names": [], "problem": "NVIDIA's driver is 535.1"}))
"""


def with_two_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, shard: str = SHARD) -> Programs:
    """A host that shows two GPUs, and a program of shards that reports as the source `shard` does."""
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"):
        monkeypatch.delenv(name, raising=False)
    script = folder / "shard.py"
    script.write_text(shard)
    return Programs(shard=(sys.executable, str(script)))


def test_gpus_that_torch_cannot_use_count_no_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = with_two_gpus(tmp_path, monkeypatch, UNUSABLE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = read_settings([f"--shard-uds-path={tmp_path}/shard"])
    with ExitStack() as claims:
        commands = prepare(settings, programs, claims)
    assert (commands.num_shard, commands.compute_type) == (1, None)


@pytest.mark.parametrize(
    ("shard", "reason"),
    [(UNUSABLE, "driver is 535"), ("raise ImportError('libcudart')", "ImportError: libcudart")],
)
def test_device_cuda_ends_with_the_reason_why_torch_has_no_gpu(
    shard: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = with_two_gpus(tmp_path, monkeypatch, shard)
    settings = read_settings(["--device=cuda", f"--shard-uds-path={tmp_path}/shard"])
    with ExitStack() as claims, pytest.raises(NotEnoughCUDADevices, match=reason):
        prepare(settings, programs, claims)


def test_gpus_that_stay_idle_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A test that has set up the log keeps it from the fixture.
    monkeypatch.setattr(log, "propagate", True)
    programs = with_two_gpus(tmp_path, monkeypatch)
    settings = read_settings([f"--shard-uds-path={tmp_path}/shard"])
    with ExitStack() as claims, caplog.at_level("INFO", log.name):
        assert prepare(settings, programs, claims).num_shard == 1
    assert "--num-shard 2 would use all GPUs" in caplog.text


@pytest.mark.parametrize(
    ("device", "num_shard", "compute_type"),
    [("cpu", 1, None), ("cuda", 2, "2-nvidia-h100"), ("auto", 2, "2-nvidia-h100")],
)
def test_devices_count_where_the_model_runs_on_them(
    device: str,
    num_shard: int,
    compute_type: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    programs = with_two_gpus(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = read_settings([f"--device={device}", f"--shard-uds-path={tmp_path}/shard"])
    with ExitStack() as claims:
        commands = prepare(settings, programs, claims)
    assert (commands.num_shard, commands.compute_type) == (num_shard, compute_type)


@pytest.mark.parametrize(
    ("device", "visible", "num_shard", "is_refused"),
    [
        ("cuda", None, 3, True),
        ("auto", None, 3, True),
        ("auto", "1", 2, True),
        ("auto", None, 2, False),
        ("cpu", None, 3, False),
        ("auto", "", 3, False),
    ],
)
def test_more_shards_than_gpus_are_refused_at_once(
    device: str,
    visible: str | None,
    num_shard: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_refused: bool,
) -> None:
    programs = with_two_gpus(tmp_path, monkeypatch)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    settings = read_settings(
        [f"--device={device}", f"--num-shard={num_shard}", f"--shard-uds-path={tmp_path}/shard"]
    )
    with ExitStack() as claims:
        if is_refused:
            with pytest.raises(NotEnoughCUDADevices, match=f"{num_shard} shards need as many"):
                prepare(settings, programs, claims)
        else:
            assert prepare(settings, programs, claims).num_shard == num_shard
