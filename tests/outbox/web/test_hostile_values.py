"""Whatever a number, an id, a moment or a text of a request is, the page answers it."""

from itertools import product

import pytest

from tests.fixtures.web import Browser, browsing

UUIDS = ("0" * 32, "f" * 32, "٠" * 32, "9" * 5000)
MOMENTS = (
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59-14:00",
    "2026-01-31T14:00+23:59:59.999999",
    "infinity",
    "9" * 5000,
)
TEXTS = ("\0", "\ud800".encode(errors="surrogatepass").decode("latin-1"), "9" * 5000)
NUMBERS = ("9" * 5000, str(2**63), "9" * 18, "-1", "1e9", "٣", "²", "")
VALUES = {
    ("/dead-letters", "since"): MOMENTS,
    ("/dead-letters", "until"): MOMENTS,
    ("/dead-letters", "before"): [
        f"{at}_{id}" for at, id in product(MOMENTS, UUIDS[1:])
    ],
    ("/dead-letters", "id"): UUIDS,
    ("/dead-letters", "side"): TEXTS,
    ("/message", "id"): UUIDS,
    ("/messages", "key"): TEXTS,
    ("/messages", "window"): TEXTS,
    ("/jobs", "consumer"): TEXTS,
    ("/scheduled", "key"): TEXTS,
    ("/scheduled", "topic"): TEXTS,
    ("/scheduled/cancel", "id"): UUIDS,
    ("/scheduled/cancel", "why"): TEXTS,
    ("/dead-letters/plan", "until"): MOMENTS,
    ("/jobs/cancel", "job"): [f"billing {id}" for id in UUIDS],
    ("/operations/ask", "expected"): NUMBERS,
    ("/operations/ask", "why"): TEXTS,
    ("/operations/stop", "id"): UUIDS,
}
ACTIONS = (
    "/dead-letters/plan",
    "/jobs/cancel",
    "/operations/ask",
    "/operations/stop",
    "/scheduled/cancel",
)
FORM = {"kind": "discard", "why": "a probe", "until": "2026-01-31T14:00Z"}


def send(browser: Browser, path: str, field: str, value: str) -> int:
    if path in ACTIONS:
        browser.post_raw(path, {**FORM, field: value})
        return browser.status
    return int(browser.client.get(path, params={field: value}).status_code)


@pytest.mark.parametrize(("path", "field"), VALUES)
def test_every_value_is_accepted_or_refused(
    database_url: str, path: str, field: str
) -> None:
    with browsing(database_url) as browser:
        for value in VALUES[path, field]:
            status = send(browser, path, field, value)
            assert (value[:40], status in {200, 400, 404}) == (value[:40], True)
