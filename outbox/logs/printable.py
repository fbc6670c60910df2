"""Text as it may be shown: others' text that no terminal obeys, and numbers."""


def printable(text: object, *, lines: bool = False) -> str:
    """Escape what a terminal would not show, or would obey, so that it stays one line.

    That is whatever Unicode counts as control (C0, C1), format (overrides of direction
    among them), surrogate, private or separator, but the space.

    Args:
        lines: line breaks and tabs stay as they are.
    """
    text = str(text)
    if text.isprintable():
        return text
    kept = "\n\t" if lines else ""
    return "".join(
        c if c.isprintable() or c in kept else c.encode("unicode_escape").decode()
        for c in text
    )


def count(number: int, what: str) -> str:
    """Write a number with a noun of regular plural: `1 lane`, `1,204 lanes`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
