"""Which tests are the most likely to find a fault in a file."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Final

_MOST: Final = 40
_PACKAGES: Final = {"outbox", "inbox", "relay"}
_TESTED_BY: Final = {
    "migration": "administration",  # of the schema's functions
    "publisher": "broker",
    "source": "broker",
}


def nearest_tests(
    file: str, product: Mapping[str, str], tests: Mapping[str, str]
) -> Sequence[str]:
    """Return the paths of tests, the nearest first.

    A test is near a file if their paths have words in common, since tests have the
    product's folders, and if it names the module, or the one that loads the SQL. Tests
    that kill processes come after others that are as near.

    Args:
        product: the text of each file.
        tests: the text of each module of tests.
    """
    files = [file]
    mentions = {_module(file)}
    if file.endswith(".sql"):
        statement = f'"{PurePath(file).stem}"'
        mentions = {statement}
        files += [path for path, code in product.items() if statement in code]
        mentions |= {_module(path) for path in files[1:]}
    words = set().union(*map(_words, files))
    words |= {_TESTED_BY[word] for word in words & _TESTED_BY.keys()}

    def nearness(test: str) -> int:
        in_common = words & _words(test)
        is_named = any(mention in tests[test] for mention in mentions)
        # The name of a package says less than that of a folder or a file.
        return 2 * len(in_common) - len(in_common & _PACKAGES) + 2 * is_named

    def rank(test: str) -> tuple[int, bool, int]:
        return -nearness(test), "mark.fault" in tests[test], len(tests[test])

    return sorted(filter(nearness, tests), key=rank)[:_MOST]


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _words(path: str) -> set[str]:
    """Return the words of a path, in the singular."""
    words = re.findall(r"[a-z]{3,}", path.removeprefix("tests/").rpartition(".")[0])
    return {word.removesuffix("s") for word in words} - {"test"}
