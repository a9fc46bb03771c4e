"""Arguments of the application on Ray Serve: what is the launcher's, and what is refused by name."""

from __future__ import annotations

import pytest

from millrace_launcher.settings.flags import all_flags
from millrace_ray.serving.arguments import flag_names, read
from millrace_ray.serving.errors import ServingError


def test_every_flag_of_the_launcher_is_known() -> None:
    assert flag_names() >= {flag.name for flag in all_flags()}


def test_flags_become_variables_of_the_launcher() -> None:
    found = read({"model_id": "m", "num_shard": 2, "deterministic": "on", "enable_lora": True})
    assert found.flags == {
        "model_id": "m",
        "num_shard": "2",
        "deterministic": "on",
        "enable_lora": "true",
    }
    assert found.num_cpus == 2.0
    assert found.launcher_flags["cpu_threads"] == "1"


def test_ranks_in_the_cluster_reserve_for_themselves() -> None:
    found = read({"cluster": "ray", "num_shard": "4"})
    assert found.num_cpus == 0.0
    assert "cpu_threads" not in found.launcher_flags


def test_a_replica_gets_its_launchers_grace() -> None:
    assert read({}).grace_seconds == 100.0
    assert read({"graceful_termination_timeout": "5"}).grace_seconds == 15.0
    assert read({"drain_delay": 8}).grace_seconds == 108.0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model_idd": "m"}, "unknown argument model_idd; did you mean model_id?"),
        ({"zzzzzz": "m"}, "unknown argument zzzzzz"),
        ({"port": "70000"}, "the argument port is 70000: Input should be less than or equal"),
        ({"num_gpus": "many"}, "the argument num_gpus is many"),
        ({"num_shard": "two"}, "the argument num_shard has to be a whole number, not two"),
        ({"remote_shards": "h:1"}, "remote_shards is not for Ray Serve: replicas cannot share"),
        ({"ssl_certfile": "f"}, "ssl_certfile is not for Ray Serve"),
        ({"num_replicas": 2, "max_replicas": 3}, "leave out max_replicas"),
        ({"min_replicas": 2}, "min_replicas needs max_replicas"),
        ({"min_replicas": 4, "max_replicas": 3}, "min_replicas (4) is more than max_replicas (3)"),
    ],
)
def test_what_cannot_be_is_said_by_name(given: dict[str, object], said: str) -> None:
    with pytest.raises(ServingError) as raised:
        read(given)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
