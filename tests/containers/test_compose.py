"""docker/compose.yaml starts in order, does its work, and stops in order."""

import json
import re

import httpx2
import pytest
import yaml

from tests.containers.engine import DOCKER, Project, docker, run, running_project
from tests.fixtures.variants import as_variant
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import Browser

LASTING = ("billing", "shipping")
PATIENCE = 120


def sell(project: Project) -> None:
    sold = project.compose("run", "--rm", "-T", "shop", check=False)
    logs = project.compose("logs", "--tail", "20").stdout
    assert sold.returncode == 0, f"{sold.stdout}{sold.stderr}{logs}"
    assert "everything holds" in sold.stdout


def doctor(project: Project) -> str:
    return project.pillarbox("doctor", check=False).stdout


def test_every_order_reaches_both_consumers(shop: Project) -> None:
    sell(shop)
    for service in ("database", *LASTING):
        assert shop.state(service)["Health"]["Status"] == "healthy"
    for service in ("migrations", "roles", "broker"):
        assert shop.state(service)["ExitCode"] == 0


def test_the_processes_log_in_with_their_own_roles(shop: Project) -> None:
    ours = "shop_consumer"
    query = (
        "SELECT DISTINCT usename FROM pg_stat_activity WHERE client_addr IS NOT NULL"
        " AND usename <> 'shop' ORDER BY usename"
    )
    wait_for(ours, lambda: shop.psql(query) == ours, seconds=PATIENCE)


def test_no_password_is_in_the_environment_of_a_container(shop: Project) -> None:
    secrets = [path.read_text() for path in (DOCKER / "secrets").glob("*-password")]
    assert len(secrets) == 8
    for service in ("database", "migrations", "roles", "broker", *LASTING):
        told = json.dumps(inspect(shop, service))
        assert not [secret for secret in secrets if secret in told]


def inspect(project: Project, service: str) -> object:
    return json.loads(docker("container", "inspect", project.container(service)))


def test_a_missing_partition_is_found_and_made(shop: Project) -> None:
    days = (
        "SELECT inhrelid::regclass FROM pg_inherits"
        " WHERE inhparent = 'outbox.message'::regclass ORDER BY inhrelid"
    )
    made = shop.psql(days).splitlines()
    switch = (
        "UPDATE cron.job SET active = {} WHERE jobname LIKE 'pillarbox upkeep of %'"
    )
    shop.psql(switch.format("false"))  # it would make the partition itself
    try:
        shop.psql(f"DROP TABLE {sorted(made)[-2]}")
        assert "outbox.message" in doctor(shop)
        assert shop.pillarbox("maintain", "--dry-run").stdout != "nothing to do\n"
        shop.pillarbox("maintain")
        assert sorted(shop.psql(days).splitlines()) == sorted(made)
        assert "outbox.message" not in doctor(shop)
        assert shop.pillarbox("maintain", "--dry-run").stdout == "nothing to do\n"
    finally:
        shop.psql(switch.format("true"))


def test_pg_cron_runs_the_upkeep_in_this_database(shop: Project) -> None:
    jobs = shop.psql("SELECT database, jobname FROM cron.job WHERE active")
    assert "shop|pillarbox upkeep of shop" in jobs.splitlines()
    launcher = "SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ 'pg_cron'"
    assert shop.psql(launcher) == "1"


def test_the_page_runs_with_a_role_of_its_own(shop: Project) -> None:
    shop.compose("up", "-d", "--no-build", "web")
    wait_for(
        "a healthy page",
        lambda: shop.state("web")["Health"]["Status"] == "healthy",
        seconds=PATIENCE,
    )
    _, token, *_ = (DOCKER / "secrets" / "web-tokens").read_text().split()
    address = f"http://127.0.0.1:{shop.ports['PILLARBOX_WEB_PORT']}"
    with httpx2.Client(base_url=address, follow_redirects=True, timeout=60) as client:
        browser = Browser(client)
        browser.log_in(token)
        browser.get("/overview")
        assert browser.status == 200
        shop.psql("ALTER ROLE shop_web NOLOGIN")
        try:
            assert "shop_web" in browser.get("/overview")
            assert browser.status == 503
        finally:
            shop.psql("ALTER ROLE shop_web LOGIN")


def image_of(service: str) -> str:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    return str(services[service]["image"])


def test_prometheus_scrapes_every_process_and_loads_the_rules(shop: Project) -> None:
    run(str(DOCKER / "local-images"), image_of("prometheus"))
    shop.compose("up", "-d", "--no-build", "prometheus")

    def asked(query: str) -> str:
        told = shop.compose(
            *("exec", "-T", "prometheus", "promtool", "query", "instant"),
            *("http://127.0.0.1:9090", query),
            check=False,
        )
        return told.stdout

    def services() -> set[str]:
        return set(re.findall(r'service="(\w+)"', asked("up == 1")))

    wait_for("all are up", lambda: services() == set(LASTING), seconds=PATIENCE)
    health = shop.state("prometheus")["Health"]
    assert health["Status"] != "unhealthy", health
    rules = shop.compose(
        *("exec", "-T", "prometheus", "promtool", "check", "config"),
        "/etc/prometheus/prometheus.yaml",
    )
    assert "1 rule files found" in rules.stdout


def test_grafana_has_the_board(shop: Project) -> None:
    image = image_of("grafana")
    if run("docker", "pull", "--quiet", image, check=False).returncode:
        pytest.skip(f"no registry gives {image}, and no package of Debian has it")
    shop.compose("up", "-d", "--no-build", "grafana")

    def board() -> str:
        url = "http://127.0.0.1:3000/api/dashboards/uid/pillarbox"
        get = ("exec", "-T", "grafana", "wget", "-q", "-O-", url)
        return shop.compose(*get, check=False).stdout

    wait_for("the board", lambda: '"title":"pillarbox"' in board(), seconds=PATIENCE)


def test_a_stopped_process_has_no_heartbeat_until_it_continues(
    shop: Project,
) -> None:
    billing = shop.container("billing")

    def beats() -> bool:
        return run("docker", "exec", billing, "heartbeat", check=False).returncode == 0

    wait_for("the heartbeat", beats, seconds=PATIENCE)
    docker("kill", "--signal", "STOP", billing)
    docker("exec", billing, "touch", "--date=-1 minute", "/run/pillarbox/heartbeat")
    assert not beats()
    docker("kill", "--signal", "CONT", billing)
    wait_for("the heartbeat again", beats, seconds=PATIENCE)


@pytest.mark.parametrize(
    "broker", ["redis", *map(as_variant, ["nats", "rabbitmq", "sns"])]
)
def test_the_demo_works_with_another_broker_and_a_stop_drains(broker: str) -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    run(str(DOCKER / "local-images"), services[broker]["image"])
    variables = str(DOCKER / f"brokers/{broker}.env")
    with running_project("--env-file", variables) as project:
        sell(project)
        stopped = ("relay", *LASTING)
        project.compose("stop", *stopped)
        assert {project.state(name)["ExitCode"] for name in stopped} == {0}


@pytest.mark.variant
def test_the_image_with_postgresql_15_passes_the_same_checks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(str(DOCKER / "build-images"), "15")
    monkeypatch.setenv("PILLARBOX_POSTGRES_IMAGE", "pillarbox-postgres:15")
    with running_project() as project:
        assert project.psql("SHOW server_version").startswith("15.")
        sell(project)
        project.pillarbox("maintain")
        assert project.pillarbox("maintain", "--dry-run").stdout == "nothing to do\n"
