"""A tag is released only if the changelog has a dated section for it."""

import re
from datetime import date

import pytest

from tests.release.changelog import CHANGELOG, UNRELEASED, main, release_notes

TODAY = date(2026, 12, 1)
READY = """\
# Changelog

## Unreleased

## 1.1.0 - 2026-12-01

- More.

### Details

- Much more.

## 1.0.0 - 2026-11-01

- The first.
"""


def test_the_notes_are_the_whole_section_of_the_version() -> None:
    notes = release_notes(READY, "v1.1.0", today=TODAY)

    assert notes == "- More.\n\n### Details\n\n- Much more."


@pytest.mark.parametrize(
    ("tag", "old", "new", "error"),
    [
        ("1.1.0", "", "", "tag 1.1.0: must be v and a version"),
        ("v1.1", "", "", "tag v1.1: must be v and a version"),
        (
            "v1.0.0",
            "",
            "",
            "the newest version is 1.1.0, and not that of the tag v1.0.0",
        ),
        ("v1.1.0", " - 2026-12-01", "", "1.1.0: has no date: write '## 1.1.0 - 2026"),
        ("v1.1.0", "2026-12-01", "2026-13-01", "has no date"),
        ("v1.1.0", "2026-12-01", "2026-12-02", "lies in the future"),
        (
            "v1.1.0",
            READY[READY.index("- More") :],
            "",
            "is empty: say what has changed",
        ),
        ("v1.1.0", "Unreleased\n", "Unreleased\n\n- New.\n", "Unreleased isn't empty"),
        ("v1.1.0", READY[READY.index("## ") :], "", "the newest version is missing"),
    ],
)
def test_a_tag_without_a_finished_section_is_refused(
    tag: str, old: str, new: str, error: str
) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        release_notes(READY.replace(old, new, 1), tag, today=TODAY)

    assert error in str(refused.value)


def test_the_command_prints_the_error_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("latest") == 1
    assert capsys.readouterr() == (
        "",
        "tag latest: must be v and a version, such as v1.2.3\n",
    )


def test_new_lines_go_above_the_versions_which_are_dated() -> None:
    first, *versions = re.findall(r"^## (.+)$", CHANGELOG.read_text(), re.MULTILINE)

    assert first == UNRELEASED
    dated = re.compile(r"\d+\.\d+\.\d+\S* - \d{4}-\d\d-\d\d")
    assert [heading for heading in versions if not dated.fullmatch(heading)] == []
