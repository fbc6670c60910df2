"""The examples of docker/: what they run exists, and they keep the rules they show."""

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

import inbox.cli
import outbox.cli
import relay.cli
from relay.config import RelayConfig

DOCKER = Path(__file__).parent.parent.parent / "docker"
MAINS = {"relay": relay.cli.main, "inbox": inbox.cli.main, "outbox": outbox.cli.main}


def manifests() -> list[Any]:
    files = sorted((DOCKER / "kubernetes").glob("*.yaml"))
    return [
        pytest.param(document, id=f"{file.stem} {document['kind']}")
        for file in files
        for document in yaml.safe_load_all(file.read_text())
        if pod_of(document)
    ]


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    """Give the pod's specification that a manifest has, however deep."""
    spec = document.get("spec", {})
    while (inner := spec.get("template") or spec.get("jobTemplate")) is not None:
        spec = inner["spec"]
    return spec if "containers" in spec else None


def units() -> list[Path]:
    return sorted((DOCKER / "systemd").iterdir())


def commands() -> Iterator[Any]:
    for unit in units():
        for line in re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE):
            program, *arguments = shlex.split(line)
            yield pytest.param([Path(program).name, *arguments], id=unit.name)
    for parameter in manifests():
        pod = pod_of(parameter.values[0])
        assert pod is not None
        yield pytest.param(pod["containers"][0]["args"], id=parameter.id)
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    for name, service in services.items():
        if service.get("command", [None])[0] in MAINS:
            yield pytest.param(service["command"], id=f"compose {name}")


@pytest.mark.parametrize("command", list(commands()))
def test_a_command_is_one_of_ours_with_options_that_it_has(
    command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *arguments = command

    def parse(parser: Any, _: Callable[..., int], argv: list[str]) -> int:
        return int(parser.parse_args(argv).run is None)

    monkeypatch.setattr(f"{name}.cli.run_command", parse)
    assert MAINS[name](arguments) == 0


@pytest.mark.parametrize("manifest", manifests())
def test_a_job_that_is_run_again_has_a_new_name(manifest: dict[str, Any]) -> None:
    """The pod of a Job that exists, its image too, can't be changed."""
    names = manifest["metadata"].keys() & {"name", "generateName"}
    assert names == {"generateName" if manifest["kind"] == "Job" else "name"}


@pytest.mark.parametrize("manifest", manifests())
def test_a_pod_runs_without_rights_and_has_its_secrets_from_files(
    manifest: dict[str, Any],
) -> None:
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


def relays_in_containers() -> Iterator[Any]:
    """Give the limit in bytes and the arguments of each relay in a container."""
    for parameter in manifests():
        pod = pod_of(parameter.values[0])
        assert pod is not None
        for container in pod["containers"]:
            if container["args"][0] == "relay":
                limit = container["resources"]["limits"]["memory"]
                yield pytest.param(limit, container["args"], id=parameter.id)
    service = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["relay"]
    yield pytest.param(service["mem_limit"], service["command"], id="compose")


@pytest.mark.parametrize(("limit", "arguments"), list(relays_in_containers()))
def test_a_relay_has_the_memory_that_its_batches_may_take(
    limit: str, arguments: list[str]
) -> None:
    given = dict(pairwise(arguments))
    default = RelayConfig()
    config = RelayConfig(
        concurrency=int(given.get("--concurrency", default.concurrency)),
        max_batch_bytes=int(given.get("--max-batch-bytes", default.max_batch_bytes)),
        max_payload_bytes=int(
            given.get("--max-payload-bytes", default.max_payload_bytes)
        ),
    )
    mebibytes = int(re.sub(r"(Mi|m)$", "", limit))
    assert config.memory_bytes <= mebibytes * 1024 * 1024


def test_no_password_stands_in_a_file_of_docker() -> None:
    for file in DOCKER.rglob("*"):
        if file.is_file() and file.parent.name != "secrets":
            text = file.read_text()
            assert not re.search(r"://\w+:\w+@", text), file


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze"
)
def test_systemd_finds_nothing_wrong_with_the_units(tmp_path: Path) -> None:
    for unit in units():
        text = unit.read_text()
        # Where the programs lie is not this machine's.
        text = re.sub(r"^(ExecStart)=.*$", r"\1=/bin/true", text, flags=re.MULTILINE)
        text = re.sub(r"^(WorkingDirectory)=.*$", r"\1=/", text, flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    names = [str(tmp_path / unit.name.replace("@", "@x")) for unit in units()]
    checked = subprocess.run(
        ["systemd-analyze", "verify", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    said = [line for line in checked.stderr.splitlines() if str(tmp_path) in line]
    assert (checked.returncode, said) == (0, [])
