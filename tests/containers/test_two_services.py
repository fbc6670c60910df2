"""The page about two services, followed with a systemd and with a Docker engine."""

import re
from pathlib import Path
from typing import Final
from uuid import uuid4

import yaml
from typing_extensions import override

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.containers.engine import compose_program
from tests.containers.systemd import running_systemd
from tests.test_two_services import PAGE, PROCESSES, Operator, folder

__all__ = ["folder"]

ROW: Final = r"^\| `systemctl (\w+) .+?` \| `(.+) orders-relay` \|$"
AS_CONTAINERS: Final = dict(re.findall(ROW, PAGE.read_text(), re.MULTILINE))


def test_the_page_can_be_followed_with_systemd(
    folder: Path, redis_url: str, private_server: PostgresServer
) -> None:
    operator = Operator(folder, redis_url, private_server)
    (folder / "etc" / "shop").mkdir(parents=True)
    mounts = {
        folder / "systemd": "/etc/systemd/system",
        folder / "etc" / "shop": "/etc/shop",
        folder / "shop_orders": "/opt/shop/shop_orders",
        folder / "shop_invoicing": "/opt/shop/shop_invoicing",
    }
    with running_systemd(mounts) as host:
        operator.has(
            "systemctl", f'#!/bin/sh\nexec docker exec {host.name} systemctl "$@"\n'
        )

        operator.follows_the_page()

        for unit in PROCESSES:
            host.systemctl("stop", unit)
            assert host.shown(unit, "Result", "NRestarts") == ["success", "0"]


class Composer(Operator):
    """Somebody who runs the containers in the page's table instead of the units."""

    def __init__(self, folder: Path, redis: str, server: PostgresServer) -> None:
        super().__init__(folder, redis, server)
        image = f"pillarbox-test-{uuid4().hex[:8]}"
        compose = folder / "compose.yaml"
        text = compose.read_text().replace("/etc/shop", str(folder / "etc" / "shop"))
        compose.write_text(text.replace("image: shop", f"image: {image}"))
        # The servers are on this host.
        network = {it: {"network_mode": "host"} for it in PROCESSES.values()}
        (folder / "host.yaml").write_text(yaml.safe_dump({"services": network}))
        self._environment |= {
            "COMPOSE_PROJECT_NAME": image,
            "COMPOSE_FILE": "compose.yaml:host.yaml",
            "COMPOSE_ANSI": "never",
        }

    @override
    def _run(self, line: str) -> str:
        if line.startswith("systemctl "):
            _, action, *units = line.split()
            line = " ".join([AS_CONTAINERS[action], *(PROCESSES[it] for it in units)])
        return super()._run(line.replace("docker compose", " ".join(compose_program())))

    @override
    def leaves(self) -> None:
        super().leaves()
        self._run("docker compose down --rmi all")


def test_the_page_can_be_followed_with_containers(
    folder: Path, redis_url: str, private_server: PostgresServer
) -> None:
    Composer(folder, redis_url, private_server).follows_the_page()
