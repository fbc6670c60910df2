"""Text that is safe to show: text from other sources, escaped, and numbers."""


def printable(text: object, *, lines: bool = False) -> str:
    """Escape what a terminal would hide or interpret; the text stays on one line.

    These are the characters that Unicode classifies as control (C0, C1), format
    (direction overrides among them), surrogate, private use, unassigned or separator,
    except the space.

    Args:
        lines: leave line breaks and tabs as they are.
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
    """Write a number with a noun whose plural is regular: `1 lane`, `1,204 lanes`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
