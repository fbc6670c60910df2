"""Print the changelog's section of a tag's version; exit with 1 if it isn't ready.

    python -m tests.release.changelog v1.2.3

Runs without pillarbox's dependencies, before anything is built.
"""

import re
import sys
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Final

CHANGELOG: Final = Path(__file__).parent.parent.parent / "CHANGELOG.md"
UNRELEASED: Final = "Unreleased"
_TAG: Final = re.compile(r"v(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)")


def release_notes(changelog: str, tag: str, *, today: date) -> str:
    """Return the text below the heading of the tag's version.

    Raises:
        ValueError: the tag isn't a version; the newest section isn't that version's,
            has no date, or is empty; or the section of what is unreleased isn't empty.
    """
    found = _TAG.fullmatch(tag)
    if found is None:
        raise ValueError(f"tag {tag}: must be v and a version, such as v1.2.3")
    version = found[1]
    # The text before the first heading, then headings and texts in turn.
    _, *parts = re.split(r"^## (.+)\n", changelog, flags=re.MULTILINE)
    sections = [
        (heading.strip(), text.strip())
        for heading, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    if sections and sections[0][0] == UNRELEASED:
        if sections[0][1]:
            raise ValueError(
                f"CHANGELOG.md: {UNRELEASED} isn't empty: move its lines below"
                f" '## {version} - {today}'"
            )
        del sections[0]
    heading, text = sections[0] if sections else ("", "")
    name, _, day = heading.partition(" - ")
    if name != version:
        raise ValueError(
            f"CHANGELOG.md: the newest version is {name or 'missing'}, and not that of"
            f" the tag {tag}: add '## {version} - {today}'"
        )
    try:
        released = date.fromisoformat(day)
    except ValueError:
        raise ValueError(
            f"CHANGELOG.md: {heading}: has no date: write '## {version} - {today}'"
        ) from None
    if released > today:
        raise ValueError(
            f"CHANGELOG.md: {heading}: lies in the future: today is {today}"
        )
    if not text:
        raise ValueError(f"CHANGELOG.md: {heading}: is empty: say what has changed")
    return text


def main(tag: str) -> int:
    """Print the notes, or the error."""
    try:
        notes = release_notes(
            CHANGELOG.read_text(), tag, today=datetime.now(UTC).date()
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{notes}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
