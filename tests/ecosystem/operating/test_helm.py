"""The Helm chart in each of its shapes: Helm's linter, the schemas of all kinds, and the flags of our programs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import jsonschema
import pytest
from tests.ecosystem import prepare
from tests.ecosystem.operating.chart import SCHEMAS, Object, Pod, pods, rendered, shapes

from millrace_launcher.config import RankConfig
from millrace_launcher.settings.arguments import Settings, read_settings
from millrace_launcher.settings.checks import check
from millrace_launcher.settings.rank_arguments import read_rank_settings
from millrace_launcher.supervision.launcher import EXIT_MARGIN_SECONDS
from millrace_launcher.supervision.rank_host import GRACE_SECONDS
from millrace_router.app import OPEN_PATHS

pytestmark = pytest.mark.ecosystem

SHAPES = shapes()
OUR_SCHEMAS = {"LeaderWorkerSet": "leaderworkerset", "InferencePool": "inferencepool"}
THEIR_GROUPS = (
    "cert-manager.io",
    "gateway.networking.k8s.io",
    "keda.sh",
    "monitoring.coreos.com",
)
ALWAYS = {"Service"}
KINDS = {
    "cpu": {"Deployment", "PodDisruptionBudget"},
    "demo": {"Deployment"},
    "folder": {"LeaderWorkerSet", "PodDisruptionBudget", "HTTPRoute"},
    "gateway": {
        "ConfigMap",
        "Deployment",
        "HTTPRoute",
        "InferencePool",
        "PodDisruptionBudget",
        "PodMonitor",
    },
    "gpu": {"Deployment", "PodDisruptionBudget"},
    "keda": {"Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "ScaledObject"},
    "three-nodes": {"HorizontalPodAutoscaler", "LeaderWorkerSet", "PodDisruptionBudget"},
    "two-nodes": {
        "Certificate",
        "Issuer",
        "LeaderWorkerSet",
        "NetworkPolicy",
        "PodDisruptionBudget",
    },
}


@pytest.fixture(scope="module")
def answers() -> dict[str, Object]:
    return dict(zip(SHAPES, rendered(list(SHAPES.values())), strict=True))


def of_kind(objects: list[Object], kind: str) -> Object:
    (found,) = [one for one in objects if one["kind"] == kind]
    return dict(found)


def server_settings(pod: Pod, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    (folder / "api-keys").write_text("a: secret\n")

    def mounted(value: str) -> str:
        """The value with a folder of this machine for the secret that the pod mounts."""
        return value.replace("/etc/millrace/keys", str(folder))

    environment = {name: mounted(value) for name, value in pod.environment.items()}
    with monkeypatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        arguments = [mounted(argument) for argument in pod.arguments(folder)]
        settings = read_settings(arguments, environment)
    check(settings)
    return settings


def rank_settings(pod: Pod, folder: Path) -> tuple[Settings, RankConfig]:
    command, *arguments = pod.arguments(folder)
    assert command == "shards"
    return read_rank_settings(arguments, pod.environment)


@pytest.mark.parametrize("shape", SHAPES)
def test_helm_and_kubernetes_accept_the_chart(shape: str, answers: dict[str, Object]) -> None:
    answer = answers[shape]
    assert answer.get("error") is None
    assert (answer["messages"], answer["invalid"]) == ([], [])
    assert {one["kind"] for one in answer["objects"]} == KINDS[shape] | ALWAYS
    names = [(one["kind"], one["metadata"]["name"]) for one in answer["objects"]]
    assert len(set(names)) == len(names)
    for one in answer["objects"]:
        if name := OUR_SCHEMAS.get(one["kind"]):
            jsonschema.validate(one, json.loads((SCHEMAS / f"{name}.json").read_text()))


def test_extensions_accept_their_objects(answers: dict[str, Object]) -> None:
    node = prepare.node()
    if node is None or not (prepare.CLIENTS / "js" / "node_modules" / ".package.json").exists():
        pytest.skip("no Node: make test-all SUITE=ecosystem installs it")
    objects = [
        one
        for answer in answers.values()
        for one in answer["objects"]
        if one["apiVersion"].partition("/")[0] in THEIR_GROUPS
    ]
    scaled = of_kind(answers["keda"]["objects"], "ScaledObject")
    wrong = [
        {**of_kind(answers["gateway"]["objects"], "HTTPRoute"), "spec": {"rules": "none"}},
        {**scaled, "spec": {**scaled["spec"], "maxReplicas": 3}},
    ]
    checked = subprocess.run(
        [node, prepare.CLIENTS / "js" / "manifests.mjs"],
        input=json.dumps([*objects, *wrong]),
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr
    *problems, mistyped, unknown = json.loads(checked.stdout)
    assert problems == [None] * len(objects)
    assert {one["kind"] for one in objects} >= {"Certificate", "HTTPRoute", "ScaledObject"}
    assert "array" in mistyped
    assert "unknown spec.maxReplicas" in unknown


@pytest.mark.parametrize("shape", SHAPES)
def test_the_server_s_command_is_ours(
    shape: str, answers: dict[str, Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, *workers = pods(answers[shape]["objects"])
    settings = server_settings(server, tmp_path, monkeypatch)
    values = SHAPES[shape]
    assert settings.launcher.model_id == values.get("model", {}).get("id")
    ports = {one["name"]: one["containerPort"] for one in server.container["ports"]}
    events = {"kv-events": 5557, "kv-events-replay": 5558} if shape == "keda" else {}
    assert ports == {"http": settings.router.port, **events}
    for policy in answers[shape]["objects"]:
        if policy["kind"] == "NetworkPolicy" and policy["metadata"]["name"].endswith("-server"):
            (rule,) = policy["spec"]["ingress"]
            assert [one["port"] for one in rule["ports"]] == list(ports)
    if not workers:
        assert settings.launcher.num_shard == values.get("ranks", 1)
    for name, value in values.get("flags", {}).items():
        owners = (settings.launcher, settings.router, settings.shard)
        field = name.replace("-", "_")
        (owner, *_) = [one for one in owners if field in type(one).model_fields]
        said = getattr(owner, field)
        if isinstance(value, bool | int | float):
            assert said == value
        if isinstance(value, list):
            assert list(said) == value


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "LeaderWorkerSet" in KINDS[shape]])
def test_ranks_are_where_the_router_looks_for_them(
    shape: str, answers: dict[str, Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, *workers = pods(answers[shape]["objects"])
    router = server_settings(server, tmp_path, monkeypatch)
    leader, _, domain = server.environment["LWS_LEADER_ADDRESS"].partition(".")
    found = {}
    for worker in workers:
        settings, rank = rank_settings(worker, tmp_path)
        shard = settings.shard
        assert shard.address is not None
        port = int(shard.address.rpartition(":")[2])
        assert settings.launcher.num_shard is not None
        for place in range(settings.launcher.num_shard):
            host = f"{leader}-{worker.index}.{domain}"
            found[rank.first_rank + place] = f"{host}:{port + place}"
        assert shard.world_size == SHAPES[shape]["ranks"]
        assert shard.master_addr == f"{leader}-1.{domain}"
        assert settings.launcher.model_id == router.launcher.model_id
        assert settings.launcher.revision == router.launcher.revision
        for name in ("dtype", "quantize", "deterministic", "enable_lora", "allow_insecure_tcp"):
            assert getattr(shard, name) == getattr(router.shard, name)
        assert shard.max_total_tokens == router.router.max_total_tokens
        router_files = [router.router.shard_tls_cert, router.router.shard_tls_key]
        assert [shard.tls_cert, shard.tls_key] == router_files
        assert (shard.tls_ca is None) == shard.allow_insecure_tcp
    assert [found[rank] for rank in sorted(found)] == list(router.launcher.remote_shards)
    group = of_kind(answers[shape]["objects"], "LeaderWorkerSet")["spec"]
    assert group["leaderWorkerTemplate"]["restartPolicy"] == "None"


def test_the_certificate_names_the_workers(
    answers: dict[str, Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = answers["two-nodes"]["objects"]
    server, *_ = pods(objects)
    addresses = server_settings(server, tmp_path, monkeypatch).launcher.remote_shards
    domains = {address.partition(".")[2].rpartition(":")[0] for address in addresses}
    certificates = [one["spec"] for one in objects if one["kind"] == "Certificate"]
    (names,) = [one["dnsNames"] for one in certificates if "dnsNames" in one]
    assert names == [f"*.{domain}" for domain in domains]
    secrets = {one["secretName"] for one in certificates}
    mounted = {
        volume["secret"]["secretName"] for volume in server.spec["volumes"] if "secret" in volume
    }
    assert mounted < secrets


@pytest.mark.parametrize("shape", SHAPES)
def test_streams_have_time_to_drain(
    shape: str, answers: dict[str, Object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, *workers = pods(answers[shape]["objects"])
    drain = server_settings(server, tmp_path, monkeypatch).router.graceful_termination_timeout
    before = server.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
    seconds = before.get("seconds", 0) + drain + EXIT_MARGIN_SECONDS
    assert server.spec["terminationGracePeriodSeconds"] > seconds
    for worker in workers:
        assert worker.spec["terminationGracePeriodSeconds"] > GRACE_SECONDS


def test_a_drain_delay_replaces_the_pre_stop_hook() -> None:
    flags = {"drain-delay": 20.5, "graceful-termination-timeout": 0}
    (answer,) = rendered([{"flags": flags}])
    (server,) = pods(answer["objects"])
    assert "lifecycle" not in server.container
    assert server.spec["terminationGracePeriodSeconds"] > 21 + EXIT_MARGIN_SECONDS
    assert "--drain-delay=20.5" in server.container["args"]


@pytest.mark.parametrize("shape", SHAPES)
def test_probes_and_selectors_meet(shape: str, answers: dict[str, Object]) -> None:
    objects = answers[shape]["objects"]
    server, *workers = pods(objects)
    probes = [server.container[f"{kind}Probe"] for kind in ("startup", "liveness", "readiness")]
    paths = [probe["httpGet"]["path"] for probe in probes]
    assert paths == ["/livez", "/health", "/readyz"]
    assert set(paths) <= OPEN_PATHS
    labels = server.template["metadata"]["labels"].items()
    assert labels >= of_kind(objects, "Service")["spec"]["selector"].items()
    assert dict(labels)["llm-d.ai/engine-type"] == "millrace"
    for kind in ("PodMonitor", "InferencePool"):
        for one in objects:
            if one["kind"] == kind:
                selected = one["spec"]["selector"]["matchLabels"].items()
                assert labels >= selected
    for worker in workers:
        own = worker.template["metadata"]["labels"].items()
        assert not own >= of_kind(objects, "Service")["spec"]["selector"].items()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"replicaCount": 2}, "replicaCount"),
        ({"image": {"registry": "x"}}, "registry"),
        ({"flags": {"port": 80}}, "'port'"),
        ({"ranks": 3, "ranksPerNode": 2, "tls": {"certManager": True}}, "multiple of ranksPerNode"),
        ({"ranks": 4, "ranksPerNode": 2}, "need tls.secretName"),
        ({"autoscaling": {"kind": "keda"}}, "podMonitor"),
        ({"inferencePool": {"enabled": True}}, "picker"),
        ({"httpRoute": {"enabled": True}}, "parentRefs"),
        ({"rollout": {"maxSurge": 0}}, "cannot both be 0"),
        (
            {"ranks": 4, "ranksPerNode": 2, "tls": {"certManager": True}}
            | {"rollout": {"maxUnavailable": 0}},
            "cannot both be 0",
        ),
        ({"env": [{"name": "GRACEFUL_TERMINATION_TIMEOUT", "value": "600"}]}, "into flags"),
    ],
)
def test_invalid_chart_values_are_named(values: Object, said: str) -> None:
    (answer,) = rendered([values])
    assert said in answer["error"]
