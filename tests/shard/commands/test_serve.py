"""The command line: a real process with a small random Llama."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
import torch
from demo.train_head import HEAD
from transformers import AutoConfig

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.__main__ import main
from millrace_shard.commands import download_weights
from millrace_shard.commands.chosen_kernels import Activations, by_gain, chosen_kernels
from millrace_shard.commands.composition import load, with_folders
from millrace_shard.commands.device_settings import (
    choose_device,
    choose_dtype,
    graph_settings,
    is_deterministic,
)
from millrace_shard.commands.serve import WITHOUT_EFFECT, notices, serve
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import ProcessGroup, RanksGone
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.errors import EngineEnded, UnsupportedModel
from millrace_shard.kernels.cpu import activation_gain
from millrace_shard.kernels.cpu.int8_linear import Int8Kernels
from millrace_shard.kernels.cpu.operators import CpuKernels
from millrace_shard.models.description import ModelDescription
from millrace_shard.server.address import SocketTaken
from millrace_testing.launcher.deployment import kept_port
from millrace_testing.models import fake_hub
from millrace_testing.models.fake_hub import COMMIT, REPO, Hub
from millrace_testing.models.models import CPU, VOCAB, greedy, save_tiny
from millrace_testing.shards.ranks import Forked

SECONDS = 120.0
PROMPT = [5, 9, 2, 44, 17, 3]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_tiny(path, "llama")
    return path


@contextmanager
def process(folder: Path, sockets: Path, *arguments: str) -> Iterator[Forked]:
    """A shard in a separate process; killed at the end if it still runs."""
    shard = Forked(main, command_line(folder, sockets, *arguments))
    try:
        yield shard
    finally:
        shard.end()


def command_line(folder: Path, sockets: Path, *arguments: str) -> list[str]:
    """The arguments after the name of the program."""
    return [
        *("serve", str(folder), f"--uds-path={sockets}/shard", "--device=cpu", "--cpu-threads=1"),
        *("--disable-custom-kernels", "--json-output", *arguments),
    ]


@contextmanager
def program(*arguments: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Python as a user starts it, with what follows its name; killed at the end if it still runs."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    started = subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **streams)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def steps() -> Iterator[pb.StepRequest]:
    """Greedy tokens for PROMPT, all sent at once."""
    yield pb.StepRequest(epoch=9, number=0, open=pb.Open())
    change = pb.BatchChange(
        admitted=[pb.Sequence(slot=0, input_ids=PROMPT)], grown_slots=[0], grown_blocks=[1]
    )
    prefill = pb.Prefill(change=change, chunk_slots=[0], chunk_tokens=[len(PROMPT)])
    yield pb.StepRequest(epoch=9, number=1, prefill=prefill)
    for number in range(2, NUM_TOKENS + 1):
        yield pb.StepRequest(epoch=9, number=number, decode=pb.Decode(decode_slots=[0]))


WARMUP = pb.WarmupRequest(max_batch_prefill_tokens=64, max_batch_size=2, max_concurrent_requests=2)


def test_a_shard_serves_the_models_own_tokens_and_stops_on_sigterm(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = save_tiny(folder, "llama")
    arguments = ("-m", "millrace_shard", *command_line(folder, tmp_path))
    with program(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as shard:
        with grpc.insecure_channel(f"unix:{tmp_path}/shard-0") as channel:
            stub = pb_grpc.ShardServiceStub(channel)
            info = stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=SECONDS)
            assert (info.model_type, info.vocab_size, info.dtype) == ("llama", VOCAB, "float32")
            assert list(info.eos_token_ids) == [2]
            capacity = stub.Warmup(WARMUP, timeout=SECONDS)
            assert capacity.max_total_tokens == 256
            assert capacity.max_batch_total_tokens == 512
            answers = list(stub.Steps(steps(), timeout=SECONDS))
        expected, _ = greedy(model, PROMPT, NUM_TOKENS)
        assert [answer.ids[0] for answer in answers[1:]] == expected
        shard.send_signal(signal.SIGTERM)
        output, _ = shard.communicate(timeout=SECONDS)
    assert shard.returncode == 0
    assert not (tmp_path / "shard-0").exists()
    messages = [json.loads(line)["fields"]["message"] for line in output.splitlines()]
    assert f"Server started at unix://{tmp_path}/shard-0" in messages
    assert any(re.fullmatch(r"weights loaded in \d+\.\d\d s, 0 MB", each) for each in messages)


def test_a_shard_in_use_is_neither_replaced_nor_cut_off(folder: Path, tmp_path: Path) -> None:
    """A second one is refused; the first ends its open stream and its socket, and waits for nothing."""
    with process(folder, tmp_path) as shard:
        with grpc.insecure_channel(f"unix:{tmp_path}/shard-0") as channel:
            stub = pb_grpc.ShardServiceStub(channel)
            stub.Warmup(WARMUP, wait_for_ready=True, timeout=SECONDS)
            assert (tmp_path / "shard-0").stat().st_mode & 0o777 == 0o600
            second = ShardConfig.from_args([str(folder), f"--uds-path={tmp_path}/shard"])
            with pytest.raises(SocketTaken, match=f"listens at {tmp_path}/shard-0"):
                serve(second)
            requests: SimpleQueue[pb.StepRequest | None] = SimpleQueue()
            requests.put(pb.StepRequest(epoch=9, number=0, open=pb.Open()))
            call = stub.Steps(iter(requests.get, None), timeout=SECONDS)
            assert next(call).epoch == 9
            shard.send_signal(signal.SIGTERM)
            assert list(call) == []
        shard.communicate(timeout=SECONDS)
    assert shard.returncode == 0
    assert not list(tmp_path.iterdir())


def test_a_signal_to_another_thread_ends_a_shard(folder: Path, tmp_path: Path) -> None:
    with process(folder, tmp_path) as shard:
        with grpc.insecure_channel(f"unix:{tmp_path}/shard-0") as channel:
            stub = pb_grpc.ShardServiceStub(channel)
            stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=SECONDS)
        threads = {int(each.name) for each in Path(f"/proc/{shard.pid}/task").iterdir()}
        another = max(threads - {shard.pid})
        assert ctypes.CDLL(None).tgkill(shard.pid, another, signal.SIGTERM) == 0
        shard.communicate(timeout=SECONDS)
    assert shard.returncode == 0


@pytest.mark.parametrize("flags", [(), ("--dtype=bfloat16", "--quantize=int8")])
def test_two_ranks_sample_alike(folder: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    with ExitStack() as stack:
        port = stack.enter_context(kept_port())
        group = ("--world-size=2", "--master-addr=127.0.0.1", f"--master-port={port}")
        for rank in range(2):
            stack.enter_context(process(folder, tmp_path, f"--rank={rank}", *group, *flags))
        channels = [
            stack.enter_context(grpc.insecure_channel(f"unix:{tmp_path}/shard-{rank}"))
            for rank in range(2)
        ]
        stubs = [pb_grpc.ShardServiceStub(channel) for channel in channels]
        for rank, stub in enumerate(stubs):
            assert stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=SECONDS).rank == rank
        warmups = [stub.Warmup.future(WARMUP, timeout=SECONDS) for stub in stubs]
        assert warmups[0].result() == warmups[1].result()
        calls = [stub.Steps(steps(), timeout=SECONDS) for stub in stubs]
        answers = [list(call) for call in calls]
    assert [a.checksum for a in answers[0]] == [a.checksum for a in answers[1]]
    assert all(answer.ids for answer in answers[0][1:])
    assert not any(answer.ids for answer in answers[1])


@pytest.mark.parametrize(("group_is_lost", "error"), [(False, EngineEnded), (True, RanksGone)])
def test_a_shard_ends_with_its_engine(
    group_is_lost: bool,
    error: type[Exception],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class DyingEngine(Engine):
        """Ends as soon as it has a model."""

        def attach(self, loaded: LoadedModel) -> None:
            """Take it, and end."""
            super().attach(loaded)
            self.group_is_lost = group_is_lost
            self.close()

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr("millrace_shard.commands.composition.Engine", DyingEngine)
    arguments = ["--device=cpu", "--cpu-threads=1", "--disable-custom-kernels"]
    config = ShardConfig.from_args([str(folder), f"--uds-path={tmp_path}/shard", *arguments])
    try:
        with pytest.raises(error):
            serve(config)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_model_ends_with_a_message(tmp_path: Path) -> None:
    with process(tmp_path, tmp_path) as shard:
        output = shard.communicate(timeout=SECONDS)
    assert shard.returncode == 1
    assert f"Error: no config.json in {tmp_path}" in output


def test_a_shard_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
    """A parent that starts a shard and dies by SIGKILL once the shard listens; the pipe closes with the last holder."""
    script = "import subprocess, sys; subprocess.Popen(sys.argv[1:]); sys.stdin.readline()"  # dies on kill
    shard = (sys.executable, "-m", "millrace_shard", *command_line(folder, tmp_path))
    read_end, write_end = os.pipe()
    with program("-c", script, *shard, stdin=subprocess.PIPE, stdout=write_end) as parent:
        os.close(write_end)
        with os.fdopen(read_end) as output:
            for line in output:
                if "Server started" in line:
                    parent.kill()
            # Only reached when no process holds the other end any more.


def test_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["guess"]) == 2
    assert "  download-weights " in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "  download-weights " in capsys.readouterr().out


def test_int8_is_for_bfloat16_on_cpu(folder: Path) -> None:
    cpu = torch.device("cpu")
    config = ShardConfig.from_args([str(folder), "--quantize=int8", "--dtype=bfloat16"])
    assert isinstance(load(config, cpu).kernels, Int8Kernels)
    for flag in ("--quantize=int8 --dtype=float32", "--quantize=gptq --dtype=bfloat16"):
        with pytest.raises(UnsupportedModel, match=flag.split()[0].replace("=", " ")):
            load(ShardConfig.from_args([str(folder), *flag.split()]), cpu)


def test_int8_is_for_classes_of_transformers_too(tmp_path: Path) -> None:
    save_tiny(tmp_path, "gpt2")
    config = ShardConfig.from_args([str(tmp_path), "--quantize=int8", "--dtype=bfloat16"])
    assert isinstance(load(config, torch.device("cpu")).kernels, Int8Kernels)


def test_the_identity_of_a_model_is_that_of_its_files_and_of_flags_that_steps_depend_on(
    tmp_path: Path,
) -> None:
    def identity(*flags: str) -> str:
        config = ShardConfig.from_args([str(tmp_path), "--disable-custom-kernels", *flags])
        return load(config, CPU).identity

    save_tiny(tmp_path, "llama")
    first = identity()
    assert first == identity("--uds-path=/tmp/other", "--log-level=debug", "--json-output")
    assert len({first, identity("--dtype=bfloat16"), identity("--cpu-threads=3")}) == 3
    os.utime(tmp_path / "config.json")
    assert identity() != first


def test_defaults_depend_on_the_device(folder: Path) -> None:
    config = ShardConfig.from_args([str(folder), "--device=cpu"])
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_device(config) == cpu
    assert choose_dtype(config, cpu) is torch.float32
    assert is_deterministic(config, cpu)
    assert not is_deterministic(config, cuda)
    assert graph_settings(config, cpu) is None
    settings = graph_settings(config, cuda)
    assert settings is not None
    assert settings.sizes is None
    few = ShardConfig.from_args([str(folder), "--cuda-graphs=1,8"])
    settings = graph_settings(few, cuda)
    assert settings is not None
    assert settings.sizes == (1, 8)
    none = ShardConfig.from_args([str(folder), "--cuda-graphs=0"])
    assert graph_settings(none, cuda) is None
    given = ShardConfig.from_args([str(folder), "--dtype=float16", "--deterministic=on"])
    assert choose_dtype(given, cpu) is torch.float16
    assert is_deterministic(given, cuda)


@pytest.mark.parametrize(("version", "warns"), [("2.12.1+cu128", True), ("2.13.0+cu130", False)])
def test_graphs_on_an_old_torch_are_warned_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    warns: bool,
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    for flags in ([], ["--cuda-graphs=0"]):
        caplog.clear()
        graph_settings(ShardConfig.from_args([str(folder), *flags]), torch.device("cuda"))
        assert ("CUDA needs torch 2.13 or later" in caplog.text) == (warns and not flags)


FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
GROUP = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29501"}
SERVE = (
    "org/model --uds-path /s/tgi --logger-level WARN --json-output --trust-remote-code --sharded --quantize awq"
    " --speculate 3 --dtype bfloat16 --kv-cache-dtype fp8_e5m2 --revision v1 --otlp-endpoint http://traces:4317"
    " --otlp-service-name tgi.server --max-input-tokens 100"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


@pytest.fixture
def restored_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)


def test_the_command_line_of_tgis_launcher_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    config = ShardConfig.from_args(SERVE.split())
    assert (str(config.model_folder), config.revision) == ("org/model", "v1")
    assert (config.rank, config.world_size, config.master_port) == (1, 2, 29501)
    assert str(config.socket_path) == "/s/tgi-1"
    assert (config.threshold, config.json_output) == ("warning", True)
    assert (config.quantize, config.speculate, config.dtype) == ("awq", 3, "bfloat16")
    assert config.kv_cache_dtype == "fp8_e5m2"
    assert [line.split()[0] for line in notices(config)] == [
        "--" + name.replace("_", "-") for name in WITHOUT_EFFECT
    ]


@pytest.mark.parametrize("missing", GROUP)
def test_sharded_needs_the_variables_of_the_group(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(SystemExit) as exit_:
        ShardConfig.from_args(["m", "--sharded"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    # Rank 1 of a group of one is refused for another reason as well.
    assert f"{missing} must be set when sharded is True" in error


def test_a_name_on_the_hub_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_hub.serve(Hub(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        config = with_folders(ShardConfig.from_args([REPO, "--revision=main"]))
    assert config.model_folder == cache / f"models--org--model/snapshots/{COMMIT}"
    assert config.draft_model is None
    # It is there now.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert with_folders(ShardConfig.from_args([REPO])).model_folder == config.model_folder


@pytest.mark.usefixtures("cache", "restored_log")
def test_tgis_download_flags_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--extension .bin --logger-level INFO --json-output --trust-remote-code --merge-lora --auto-convert"
    with fake_hub.serve(Hub(FILES)) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        assert download_weights.main([REPO, *flags.split()]) == 0
        loud = capsys.readouterr().out.splitlines()
        quiet = flags.replace("INFO", "ERROR")
        assert download_weights.main([REPO, *quiet.split(), "--no-auto-convert"]) == 0
    said = [json.loads(line)["fields"]["message"] for line in loud[:-1]]
    for flag in ("--extension", "--trust-remote-code", "--merge-lora", "--auto-convert"):
        assert any(message.startswith(f"{flag} has no effect") for message in said)
    assert capsys.readouterr().out.splitlines() == [loud[-1]]


INT8 = "--quantize-activations=int8"
ROUNDED = "activations are rounded to int8 where the weights are quantised to integers"
SMALL = "activations are exact, as rounding harms small models: this has 0.00 billion parameters"
NO_EFFECT = "--quantize-activations int8 has no effect"


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((INT8, "--quantize=int4"), ROUNDED),
        ((INT8, "--dtype=float32"), NO_EFFECT),
        ((INT8, "--disable-custom-kernels"), NO_EFFECT),
        (("--quantize=int4",), SMALL),
        (("--quantize=int4", "--quantize-activations=exact"), "activations are exact;"),
        (("--quantize=int8",), SMALL),
        (("--quantize=int8", INT8), ROUNDED),
        (("--quantize=int8", "--quantize-activations=exact"), "activations are exact;"),
    ],
)
def test_the_log_states_how_activations_are_computed(
    flags: tuple[str, ...], told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama")
    dtype = () if any("dtype" in flag for flag in flags) else ("--dtype=bfloat16",)
    config = ShardConfig.from_args([str(tmp_path), *dtype, *flags])
    with caplog.at_level(logging.INFO):
        chosen = chosen_kernels(config, CPU, choose_dtype(config, CPU), ProcessGroup.single())
    assert sum(told in record.message for record in caplog.records) == 1
    is_rounded = chosen.activations is not None and chosen.activations.are_int8
    assert is_rounded == (told == ROUNDED)
    if isinstance(chosen.kernels, CpuKernels):
        assert chosen.kernels.integer == (told == ROUNDED)


def test_rounding_plain_weights_is_noted_as_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny(tmp_path, "llama")
    config = ShardConfig.from_args([str(tmp_path), "--dtype=bfloat16", INT8])
    chosen = chosen_kernels(config, CPU, torch.bfloat16, ProcessGroup.single())
    assert chosen.activations is None
    assert any(record.message.startswith(NO_EFFECT) for record in caplog.records)


@pytest.mark.parametrize(
    ("gain", "rounds", "words"),
    [
        (3.0, True, "3.00 times as fast here; --quantize-activations exact keeps them"),
        (1.2, True, "1.20 times as fast here"),
        (1.19, False, "exact, as int8 is 1.19 times as fast here, and less than 1.2"),
        (None, False, "activations are exact, as the disk is full; --quantize-activations int8"),
    ],
)
def test_activations_are_rounded_where_it_was_measured_to_pay(
    gain: float | None, *, rounds: bool, words: str
) -> None:
    activations, sentence = by_gain(gain, "the disk is full")
    assert (activations.are_int8, activations.gain) == (rounds, gain)
    assert words in sentence


class OtherRank(ProcessGroup):
    """Rank 1 of two, to which rank 0 sends its gain in thousandths."""

    def __init__(self, gain: int) -> None:
        super().__init__(1, 2, CPU)
        self._gain = gain

    def broadcast(self, value: int) -> int:
        assert value == 0
        return self._gain


@pytest.mark.parametrize("quantize", ["int4", "int8"])
@pytest.mark.parametrize(("thousandths", "gain"), [(1310, 1.31), (1100, 1.1), (0, None)])
def test_every_rank_follows_the_measurement_of_rank_0(
    quantize: str,
    thousandths: int,
    gain: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("millrace_shard.commands.chosen_kernels.LEAST_PARAMETERS", 1)
    save_tiny(tmp_path, "llama")
    flags = ["--dtype=bfloat16", f"--quantize={quantize}", "--rank=1", "--world-size=2"]
    config = ShardConfig.from_args([str(tmp_path), *flags])
    chosen = chosen_kernels(config, CPU, torch.bfloat16, OtherRank(thousandths))
    assert chosen.activations == Activations(are_int8=thousandths == 1310, gain=gain)


def test_a_second_start_rounds_as_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_shard.commands.chosen_kernels.LEAST_PARAMETERS", 1)
    monkeypatch.setattr(activation_gain, "cache_folder", lambda kind: tmp_path / "cache" / kind)
    monkeypatch.setattr(activation_gain, "SAMPLE_CODES", 1 << 16)
    save_tiny(tmp_path, "llama")
    config = ShardConfig.from_args([str(tmp_path), "--dtype=bfloat16", "--quantize=int4"])
    first, second = (
        chosen_kernels(config, CPU, torch.bfloat16, ProcessGroup.single()).activations
        for _ in range(2)
    )
    assert first is not None
    assert first.gain is not None
    assert first == second
    assert first.are_int8 == (first.gain >= 1.2)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_the_count_of_parameters_is_that_of_the_matrices(architecture: str, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, architecture)
    matrices = {name: value.numel() for name, value in model.named_parameters() if value.ndim > 1}
    assert ModelDescription.read(tmp_path).num_parameters() == sum(matrices.values())


def test_the_count_of_parameters_knows_experts_over_latents(tmp_path: Path) -> None:
    """The convolutions of its recurrent layers do not count."""
    left = []
    for size in (None, 24):
        folder = tmp_path / str(size)
        model = save_tiny(folder, "nemotron_h", moe_latent_size=size)
        count = ModelDescription.read(folder).num_parameters()
        assert count is not None
        left.append(model.num_parameters() - count)
    assert left[0] == left[1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--max-total-tokens=100000",), "`max_total_tokens`=100000 is more than the model's"),
        (("--quantize=gptq",), "gptq"),
        (("--world-size=3",), "3"),
        (("--draft-model=DRAFT",), "has other tokens than the model"),
        ((f"--speculator={HEAD}",), "another hidden_size: 256, the model has 64"),
    ],
)
def test_what_the_files_refuse_is_refused_before_weights_are_read(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    folders = tmp_path / "model", tmp_path / "draft"
    for number, folder in enumerate(folders):
        save_tiny(folder, "llama")
        (folder / "model.safetensors").write_bytes(b"damaged")
        tokens = {"model": {"vocab": {"a": number}}}
        (folder / "tokenizer.json").write_text(json.dumps(tokens))
    given = [flag.replace("DRAFT", str(folders[1])) for flag in flags]
    config = ShardConfig.from_args([str(folders[0]), "--dtype=float32", *given])
    with pytest.raises(UnsupportedModel, match=message):
        load(config, CPU)


CUDA = torch.device("cuda")


def checkpoint(folder: Path, model_type: str, dtype: torch.dtype) -> Path:
    """A folder with the config of a checkpoint in `dtype`."""
    config = AutoConfig.for_model(model_type)
    config.dtype = dtype
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "dtype", "device", "flags", "chosen", "is_warned"),
    [
        ("gemma2", torch.float16, CUDA, (), torch.float16, True),
        ("gemma2", torch.bfloat16, CUDA, ("--dtype=float16",), torch.float16, True),
        ("glm4", torch.float16, CUDA, (), torch.float16, True),
        ("gemma2", torch.float16, CPU, (), torch.bfloat16, False),
        ("gemma2", torch.float16, CUDA, ("--dtype=bfloat16",), torch.bfloat16, False),
        ("llama", torch.float16, CUDA, (), torch.float16, False),
    ],
)
def test_float16_is_warned_of_where_activations_exceed_it(
    model_type: str,
    dtype: torch.dtype,
    device: torch.device,
    flags: tuple[str, ...],
    chosen: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    *,
    monkeypatch: pytest.MonkeyPatch,
    is_warned: bool,
) -> None:
    folder = checkpoint(tmp_path / "model", model_type, dtype)
    config = ShardConfig.from_args([str(folder), *flags])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with caplog.at_level(logging.WARNING):
        assert choose_dtype(config, device) is chosen
    told = [model_type in record.message for record in caplog.records]
    assert told == ([True] if is_warned else [])
