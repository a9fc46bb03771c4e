"""The command line: a real process with a small random Llama."""

from __future__ import annotations

import ctypes
import json
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
from transformers import LlamaConfig, LlamaForCausalLM

from millrace_proto import generate_pb2 as pb
from millrace_proto import generate_pb2_grpc as pb_grpc
from millrace_shard.__main__ import main
from millrace_shard.commands.composition import load
from millrace_shard.commands.device_settings import (
    choose_device,
    choose_dtype,
    graph_settings,
    is_deterministic,
)
from millrace_shard.commands.serve import serve
from millrace_shard.config import ShardConfig
from millrace_shard.device.process_group import RanksMissing
from millrace_shard.engine.engine import Engine
from millrace_shard.engine.loaded_model import LoadedModel
from millrace_shard.errors import EngineEnded, UnsupportedModel
from millrace_shard.kernels.cpu.int8_linear import Int8Kernels
from millrace_shard.server.address import SocketTaken
from millrace_testing.launcher.ports import kept_port
from millrace_testing.models.models import save_tiny
from millrace_testing.shards.forked import Forked

SECONDS = 120.0
PROMPT = [5, 9, 2, 44, 17, 3]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=127,
        dtype="float32",
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
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


def test_it_serves_the_models_own_tokens_and_stops_on_sigterm(
    model: LlamaForCausalLM, folder: Path, tmp_path: Path
) -> None:
    arguments = ("-m", "millrace_shard", *command_line(folder, tmp_path))
    with program(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as shard:
        with grpc.insecure_channel(f"unix:{tmp_path}/shard-0") as channel:
            stub = pb_grpc.ShardServiceStub(channel)
            info = stub.Info(pb.InfoRequest(), wait_for_ready=True, timeout=SECONDS)
            assert (info.model_type, info.vocab_size, info.dtype) == ("llama", 128, "float32")
            assert list(info.eos_token_ids) == [127]
            capacity = stub.Warmup(WARMUP, timeout=SECONDS)
            assert capacity.max_total_tokens == 64
            assert capacity.max_batch_total_tokens == 128
            answers = list(stub.Steps(steps(), timeout=SECONDS))
        expected = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
        assert [answer.ids[0] for answer in answers[1:]] == expected[0, len(PROMPT) :].tolist()
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


def test_a_signal_that_another_thread_is_given_ends_a_shard(folder: Path, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("group_is_lost", "error"), [(False, EngineEnded), (True, RanksMissing)])
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


def test_it_ends_with_its_parent(folder: Path, tmp_path: Path) -> None:
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
    assert "serve,download-weights,convert" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "serve,download-weights,convert" in capsys.readouterr().out


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
