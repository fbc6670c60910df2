"""The examples in docker/ run existing commands and keep their own rules."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from pillarbox.inbox.consuming.limits import HELD_BYTES
from pillarbox.outbox.cli.main import main
from pillarbox.relay.config import RelayConfig
from tests.test_alerts import promtool

MIB = 1024 * 1024
# Held payloads are in memory twice, as read by the library and in the messages;
# payloads being fetched, at most 8 MiB at once, up to five times.
CONSUMER_BYTES = 64 * MIB + 2 * HELD_BYTES + 5 * 8 * MIB
DOCKER = Path(__file__).parent.parent / "docker"
UNITS = (
    DOCKER / "systemd",
    DOCKER.parent / "examples" / "two_services" / "systemd",
)


def manifests() -> list[Any]:
    files = sorted((DOCKER / "kubernetes").glob("*.yaml"))
    return [
        pytest.param(document, id=f"{file.stem} {document['kind']}")
        for file in files
        for document in yaml.safe_load_all(file.read_text())
        if pod_of(document)
    ]


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the pod specification in a manifest, at any depth."""
    spec = document.get("spec", {})
    while (inner := spec.get("template") or spec.get("jobTemplate")) is not None:
        spec = inner["spec"]
    return spec if "containers" in spec else None


def compose_services() -> dict[str, Any]:
    return dict(yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"])


def units() -> list[Path]:
    return [it for folder in UNITS for it in sorted(folder.iterdir())]


def commands() -> Iterator[Any]:
    for unit in units():
        for line in re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE):
            program, *arguments = shlex.split(line)
            yield pytest.param([Path(program).name, *arguments], id=unit.name)
    for parameter in manifests():
        pod = pod_of(parameter.values[0])
        assert pod is not None
        yield pytest.param(pod["containers"][0]["args"], id=parameter.id)
    for name, service in compose_services().items():
        if service.get("command", [None])[0] == "pillarbox":
            yield pytest.param(service["command"], id=f"compose {name}")


@pytest.mark.parametrize("command", list(commands()))
def test_the_documented_commands_and_options_exist(
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, *arguments = command
    assert name == "pillarbox"
    for variable in ("DATABASE_URL", "DATABASE_URL_FILE"):
        monkeypatch.delenv(f"PILLARBOX_{variable}", raising=False)

    assert main(arguments) == 2

    # The options are valid: only the application or the database is missing.
    said = capsys.readouterr().err
    assert re.search(r"No module named 'shop|no database given|shop.consumers", said)


@pytest.mark.parametrize("manifest", manifests())
def test_a_pod_runs_unprivileged_with_secrets_from_files(
    manifest: dict[str, Any],
) -> None:
    # The pod of an existing Job, including its image, can't be changed.
    names = manifest["metadata"].keys() & {"name", "generateName"}
    assert names == {"generateName" if manifest["kind"] == "Job" else "name"}
    pod = pod_of(manifest)
    assert pod is not None
    assert pod["securityContext"]["runAsNonRoot"]
    (container,) = pod["containers"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"]
    assert not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    for variable in container["env"]:
        assert variable["name"].endswith("_FILE")
        assert any(
            variable["value"].startswith(f"{mount['mountPath']}/")
            for mount in container["volumeMounts"]
        )


def limited_processes() -> Iterator[Any]:
    """Yield the memory limit in MiB and the arguments of each process."""
    for parameter in manifests():
        pod = pod_of(parameter.values[0])
        assert pod is not None
        for container in pod["containers"]:
            limit = container["resources"]["limits"]["memory"]
            yield case(limit, container["args"], parameter.id)
    for name, service in compose_services().items():
        if service.get("command", [None])[0] == "pillarbox":
            yield case(service["mem_limit"], service["command"], f"compose {name}")
    for unit in units():
        settings = dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))
        if "ExecStart" in settings:
            line = shlex.split(settings["ExecStart"])
            yield case(settings["MemoryMax"], line, unit.name)


def case(limit: str, arguments: list[str], id: str | None) -> Any:
    return pytest.param(int(re.sub(r"(Mi|m|M)$", "", limit)), arguments, id=id)


@pytest.mark.parametrize(("mebibytes", "arguments"), list(limited_processes()))
def test_a_memory_limit_covers_what_the_process_may_hold(
    mebibytes: int, arguments: list[str]
) -> None:
    default = RelayConfig()
    match arguments[1]:
        case "relay":
            given = dict(pairwise(arguments))
            config = RelayConfig(
                concurrency=int(given.get("--concurrency", default.concurrency)),
                max_payload_bytes=int(
                    given.get("--max-payload-bytes", default.max_payload_bytes)
                ),
            )
            assert config.memory_bytes <= mebibytes * MIB
        case "consume":
            # The handlers may use as much again as the buffers.
            assert mebibytes * MIB >= 2 * CONSUMER_BYTES
        case _:
            assert mebibytes >= 128, "it reads the catalog, and no messages"


def test_no_docker_file_contains_a_password() -> None:
    for file in DOCKER.rglob("*"):
        if file.is_file() and file.parent.name != "secrets":
            text = file.read_text()
            assert not re.search(r"://\w+:\w+@", text), file


@pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="there is no docker-compose"
)
def test_compose_reads_the_file_and_the_profile_observe() -> None:
    file = str(DOCKER / "compose.yaml")
    done = subprocess.run(
        ["docker-compose", "-f", file, "--profile", "observe", "config"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    observing = {name for name, it in read.items() if it.get("profiles") == ["observe"]}
    assert observing == {"web", "prometheus", "grafana"}


def test_every_file_that_compose_mounts_is_in_the_repository() -> None:
    for service in compose_services().values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), source


def test_prometheus_scrapes_the_port_on_which_each_process_serves_metrics() -> None:
    path = DOCKER / "prometheus" / "prometheus.yaml"
    (scraped,) = yaml.safe_load(path.read_text())["scrape_configs"]
    (found,) = scraped["dns_sd_configs"]
    serving = {
        name
        for name, service in compose_services().items()
        if f"0.0.0.0:{found['port']}" in dict(service.get("environment", {})).values()
    }
    assert serving == set(found["names"])
    assert "1 rule files found" in promtool("check", "config", path)


def test_grafana_has_the_board_and_the_prometheus_of_the_same_profile() -> None:
    grafana = compose_services()["grafana"]
    provisioning = DOCKER / "grafana" / "provisioning"
    (prometheus,) = yaml.safe_load(
        (provisioning / "datasources" / "prometheus.yaml").read_text()
    )["datasources"]
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yaml").read_text())
    assert prometheus["url"] == "http://prometheus:9090"
    interval = scraped["global"]["scrape_interval"]
    # Grafana derives $__rate_interval from it.
    assert prometheus["jsonData"] == {"timeInterval": interval}
    (boards,) = yaml.safe_load(
        (provisioning / "dashboards" / "pillarbox.yaml").read_text()
    )["providers"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert boards["options"]["path"] == str(home.parent)
    assert f"./grafana/pillarbox.json:{home}:ro" in grafana["volumes"]


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)
@pytest.mark.parametrize("folder", UNITS)
def test_systemd_finds_nothing_wrong_with_the_units(
    folder: Path, tmp_path: Path
) -> None:
    for unit in folder.iterdir():
        text = unit.read_text()
        # The programs' paths don't exist on this machine.
        text = re.sub(r"^(ExecStart)=.*$", r"\1=/bin/true", text, flags=re.MULTILINE)
        text = re.sub(r"^(WorkingDirectory)=.*$", r"\1=/", text, flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    names = [str(tmp_path / unit.name.replace("@", "@x")) for unit in folder.iterdir()]
    checked = subprocess.run(
        ["systemd-analyze", "verify", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in checked.stderr.splitlines() if str(tmp_path) in line]
    assert (checked.returncode, said) == (0, [])
