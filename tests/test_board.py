"""The Grafana board has a valid format, and each panel shows data."""

import json
import math
import re
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

from docs.reference import board
from pillarbox import Message
from tests.acceptance.relays import Relays
from tests.fixtures.prometheus import Prometheus, running_prometheus
from tests.fixtures.relay import insert
from tests.fixtures.site import Site
from tests.fixtures.upkeep import run_upkeep
from tests.fixtures.waiting import wait_for
from tests.test_alerts import ALERTS, RULES

BOARD: dict[str, Any] = json.loads(board.PAGE.read_text())
DRAWN: list[dict[str, Any]] = [
    panel for panel in BOARD["panels"] if panel["type"] != "row"
]
TEXTS: list[dict[str, Any]] = [
    panel for row in BOARD["panels"] for panel in row.get("panels", [])
]
# Members of a Prometheus annotation query, which only the Prometheus plugin knows.
BY_THE_PLUGIN = {"titleFormat", "textFormat"}


def title_of(panel: dict[str, Any]) -> str:
    return str(panel["title"])


def unknown(given: Any, read: Any, path: str = "") -> Iterator[str]:
    """Yield the members of the board that are lost or changed when it is read."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            if name not in read:
                yield f"{path}/{name}"
            else:
                yield from unknown(value, read[name], f"{path}/{name}")
    elif isinstance(given, list) and isinstance(read, list):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from unknown(one, other, f"{path}/{number}")
    elif given != read:
        yield path


def test_the_board_equals_the_generated_one() -> None:
    assert board.PAGE.read_text() == board.page(), "run `make reference`"


def test_every_member_is_in_grafanas_model() -> None:
    register_default_plugins()  # type: ignore[no-untyped-call, unused-ignore]
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(BOARD)))
    lost = [
        path
        for path in unknown(BOARD, read)
        if path.rpartition("/")[2] not in BY_THE_PLUGIN
    ]
    assert lost == []


def test_panels_have_distinct_ids_and_do_not_overlap() -> None:
    everything = [*BOARD["panels"], *TEXTS]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for level in (BOARD["panels"], TEXTS):
        for one, other in combinations([panel["gridPos"] for panel in level], 2):
            assert (
                one["x"] + one["w"] <= other["x"]
                or other["x"] + other["w"] <= one["x"]
                or one["y"] + one["h"] <= other["y"]
                or other["y"] + other["h"] <= one["y"]
            )
        assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in level)


@pytest.mark.parametrize("panel", DRAWN, ids=title_of)
def test_a_panel_has_a_description_and_a_unit(panel: dict[str, Any]) -> None:
    known = {value for value in vars(units).values() if isinstance(value, str)}
    assert panel["fieldConfig"]["defaults"]["unit"] in known
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    for target in panel["targets"]:
        assert target["datasource"] == panel["datasource"]


def test_each_alert_has_a_runbook_on_the_board_and_a_panel_that_links_to_it() -> None:
    assert {title_of(text) for text in TEXTS} == set(ALERTS)
    numbers = {f"?viewPanel={text['id']}": title_of(text) for text in TEXTS}
    linked = set()
    for panel in DRAWN:
        for link in panel["links"]:
            path, mark, number = link["url"].partition("?viewPanel=")
            assert path == f"/d/{BOARD['uid']}"
            assert link["title"].startswith(f"{numbers[mark + number]}:")
            linked.add(numbers[mark + number])
    assert linked == set(ALERTS)


def filled(expression: str) -> str:
    """Replace the variables as Grafana does when everything is selected."""
    expression = expression.replace("$__rate_interval", "1m")
    return re.sub(r"\$(?:topic|consumer)\b", ".*", expression)


def has_data(prometheus: Prometheus, target: dict[str, Any]) -> bool:
    expression = filled(target["expr"])
    if target["instant"]:
        samples = [series["value"] for series in prometheus.query(expression)]
    else:
        now = time.time()
        found = prometheus.query_range(expression, start=now - 30, end=now, step=1)
        samples = [sample for series in found for sample in series["values"]]
    return any(not math.isnan(float(value)) for _, value in samples)


async def test_each_panel_has_data_from_a_running_relay_and_consumer(
    site: Site, other_url: str, tmp_path: Path
) -> None:
    run_upkeep(site.url)
    listen = "--listen=127.0.0.1:0"
    often = {"INTERVALS": "metrics=1"}
    with Relays(site.url, tmp_path) as relays:
        processes = {
            "relay": relays.start(other_url, listen, **often),
            "consumer": site.run("shop_app:consumer", listen, **often),
        }
        rules = running_prometheus(tmp_path / "prometheus", processes, RULES)
        with rules as prometheus:
            wait_for(
                "both are scraped",
                lambda: prometheus.targets() == dict.fromkeys(processes, "up"),
            )
            later = Message("orders", b"later", key="customer 7")
            insert(site.url, Message("orders", b"bad"), later)
            asked = [(title_of(p), target) for p in DRAWN for target in p["targets"]]

            def empty() -> list[tuple[str, str]]:
                insert(site.url, Message("orders", b"1"), Message("bulk.1", b"2"))
                asked[:] = [it for it in asked if not has_data(prometheus, it[1])]
                return [(title, target["expr"]) for title, target in asked]

            try:
                wait_for("data in each panel", lambda: not empty(), pause=0.5)
            except AssertionError as error:
                raise AssertionError(f"no data: {empty()}") from error
