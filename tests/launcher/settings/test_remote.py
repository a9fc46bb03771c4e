"""Shards on other hosts: what is refused, with what words, and which commands come of the rest."""

from __future__ import annotations

import pytest

from millrace_launcher.errors import ArgumentValidation
from millrace_launcher.settings.arguments import read_settings
from millrace_launcher.settings.checks import check, notices
from millrace_launcher.settings.commands import Commands, Programs
from millrace_launcher.settings.rank_arguments import prepare_ranks, read_rank_settings

TLS = "--shard-tls-cert=a", "--shard-tls-key=b", "--shard-tls-ca=c"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--remote-shards=a:1,b:2", "--num-shard=3", *TLS], "is 3, and `remote_shards` has 2"),
        (["--remote-shards=a:1,b", *TLS], "b has no port"),
        (["--remote-shards=a:1,:2", *TLS], ":2 has no port"),
        (["--remote-shards=a:70000", *TLS], "a:70000: a port is 1 to 65535"),
        (["--remote-shards=a:0", *TLS], "a:0: a port is 1 to 65535"),
        (["--remote-shards=a:1,a:1", *TLS], "a:1 twice"),
        (["--remote-shards=127.0.0.1:1,gpu7:2"], "would go to gpu7 in clear text"),
        (["--remote-shards=a:1", "--cluster=ray", *TLS], "leave out --remote-shards"),
        (["--shard-tls-cert=a"], "`shard_tls_cert` is for --remote-shards"),
        (["--shards-per-node=2"], "`shards_per_node` is for --cluster"),
        (["--cluster=ray", "--num-shard=3", "--shards-per-node=2"], r"multiple of .*\(2\)"),
    ],
)
def test_contradictions_are_told(flags: list[str], words: str) -> None:
    with pytest.raises(ArgumentValidation, match=words):
        check(read_settings(flags, {}))


def test_no_address_starts_no_shard_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(["--remote-shards=,"], {})
    assert "--remote-shards" in capsys.readouterr().err


def test_flags_of_ranks_are_told_to_have_no_effect_beside_ranks_elsewhere() -> None:
    given = ["--dtype=float32", "--kv-memory=1G", "--enable-lora", "--adapter-cache=/a"]
    told = notices(
        read_settings([*given, "--remote-shards=127.0.0.1:1"], {}), on_cpu=False, environ={}
    )
    assert [line.split(" has no effect: ")[0] for line in told] == ["--dtype", "--kv-memory"]
    assert list(notices(read_settings(given, {}), on_cpu=False, environ={})) == []


@pytest.mark.parametrize(
    "flags",
    [
        ["--remote-shards=localhost:1,127.0.0.1:2,[::1]:3"],
        ["--remote-shards=a:1", "--remote-shards=b:1", *TLS],
        ["--remote-shards=a:1,b:1", "--allow-insecure-tcp"],
        ["--cluster=ray", "--num-shard=4", "--shards-per-node=2"],
    ],
)
def test_the_rest_is_taken(flags: list[str]) -> None:
    check(read_settings(flags, {}))


def ranks_of(*flags: str) -> Commands:
    """The commands of `millrace-launcher shards`."""
    settings, rank = read_rank_settings(["--device=cpu", "--model-id=m", *flags], {})
    return prepare_ranks(settings, rank, Programs())


def test_ranks_of_a_host_have_the_ports_that_follow() -> None:
    commands = ranks_of(
        *("--world-size=4", "--first-rank=2", "--num-shard=2"),
        *("--master-addr=one", "--address=0.0.0.0:9000", "--tls-cert=c"),
    )
    last = commands.shard(3, commands.settings.shard.model_folder).argv
    assert {"--rank=3", "--world-size=4", "--address=0.0.0.0:9001", "--master-addr=one"} < {*last}
    assert "--tls-cert=c" in last
    assert commands.socket_paths() == []


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "`address` must be given"),
        (("--address=:9000",), "no port"),
        (("--address=localhost:65535", "--num-shard=2", "--world-size=2"), "leaves no ports for 2"),
        (("--address=localhost:9000", "--first-rank=1"), "ranks 1 to 1 are outside a group of 1"),
        (("--address=10.1.1.1:9000",), "can be reached from other hosts"),
        (
            ("--address=10.1.1.1:9000", "--world-size=2", "--allow-insecure-tcp"),
            "`master_addr` must be the host of rank 0",
        ),
    ],
)
def test_ranks_that_cannot_be_are_refused(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(ArgumentValidation, match=words):
        ranks_of(*flags)


@pytest.mark.parametrize("flag", ["--port", "--cluster", "--shards-per-node", "--remote-shards"])
def test_flags_of_the_router_are_unknown_to_ranks(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        ranks_of(f"{flag}=80")
    assert ended.value.code == 2
    assert f"unexpected argument '{flag}'" in capsys.readouterr().err
