"""The tutorial, followed literally: its files, its commands and what they print.

The first line of a block of Python names its file. What a command prints must be what
the page shows, where `…` stands for any text, and a URL, an id, a time, a port or a
duration for any other; later commands use the actual ones. A `runs-until` comment names
the text for which the reader waits before going on with another terminal, a `skip`
comment the reason for which a block isn't run.
"""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory
from typing import Final
from unittest import SkipTest

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from tests.fixtures.waiting import wait_for

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "tutorial.md"
SHOP: Final = ROOT / "examples" / "orders"
CHANGING: Final = re.compile(
    r"postgresql\+psycopg://\S+|(?<=/login#)\S+"
    r"|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # an id
    r"|\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?"  # a time
    r"|(?<=127\.0\.0\.1:)\d+"  # a port
    r"|\b\d+(?:\.\d+)?m?s\b"  # a duration
)


READS: Final = re.compile(r"pillarbox (trace|dead-letters list)|redis-cli .* XINFO")
WAIT: Final = 60


class Reader:
    """Somebody who follows the page, in a folder of their own."""

    def __init__(self, folder: Path, redis: str) -> None:
        self._folder = folder
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PILLARBOX_")},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self._terminals: list[subprocess.Popen[bytes]] = []
        # What the page shows, and what it is here.
        self._actual = {"redis://127.0.0.1": redis}
        self._until: str | None = None
        self.status = 0

    def writes(self, example: Example) -> None:
        first, _, text = example.parsed.partition("\n")
        file = self._folder / first.removeprefix("# ")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def waits(self, example: Example) -> None:
        self._until = example.parsed.strip()

    def types(self, example: Example) -> None:
        for command in re.split(r"^\$ ", example.parsed, flags=re.MULTILINE)[1:]:
            line, _, shown = command.replace("\\\n", "").partition("\n")
            for there, here in self._actual.items():
                line = line.replace(there, here)
            if line.startswith("export "):
                name, _, value = line.removeprefix("export ").partition("=")
                self._environment[name] = Template(value.strip('"')).substitute(
                    self._environment
                )
            else:
                self._compare(shown, line)

    def _run(self, line: str) -> str:
        log = self._folder / f"terminal-{len(self._terminals)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "bash",
                    "-c",
                    f"exec {line.removesuffix(' &')}",
                ],
                cwd=self._folder,
                env=self._environment,
                stdout=output,
                stderr=output,
            )
        if self._until is None:
            self.status = process.wait(timeout=120)
            return log.read_text()
        self._terminals.append(process)
        until, self._until = self._until, None

        def reached() -> bool:
            assert process.poll() is None, log.read_text()
            return until in log.read_text()

        wait_for(f"{until!r} of {line}", reached)
        return log.read_text()

    def leaves(self) -> None:
        for process in reversed(self._terminals):
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)

    def _compare(self, shown: str, line: str) -> None:
        values = CHANGING.findall(shown)
        pattern = re.escape(shown.strip()).replace("…", ".*?")
        for value in values:
            pattern = pattern.replace(re.escape(value), f"({CHANGING.pattern})", 1)
        pattern = re.sub(r"(?:\\ )+", r"\\s+", pattern)
        printed = self._run(line)

        def matches() -> re.Match[str] | None:
            # What a command lists may not have happened yet.
            nonlocal printed
            found = re.search(pattern, printed, re.DOTALL)
            if found is None and READS.match(line):
                printed = self._run(line)
            return found

        try:
            found = wait_for(line, matches, seconds=WAIT if READS.match(line) else 0)
        except AssertionError:
            pytest.fail(f"the page shows\n{shown}\nbut {line} prints\n{printed}")
        assert found is not None
        self._actual.update(zip(values, found.groups(), strict=True))


@pytest.fixture
def reader(redis_url: str) -> Iterator[Reader]:
    with TemporaryDirectory() as folder:
        # If this is root, PostgreSQL's user must be able to enter it.
        Path(folder).chmod(0o755)
        reader = Reader(Path(folder), redis_url)
        yield reader
        reader.leaves()


def page_for(reader: Reader) -> Document:
    return Document.parse(
        str(PAGE),
        CodeBlockParser("python", reader.writes),
        CodeBlockParser("console", reader.types),
        CodeBlockParser("runs-until", reader.waits),
        SkipParser(),
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_tutorial_can_be_followed_literally(reader: Reader) -> None:
    for example in page_for(reader):
        try:
            example.evaluate()
        except SkipTest:
            continue
        except Exception as error:
            error.add_note(f"in the block at {PAGE}:{example.line}")
            raise


def test_the_tutorial_builds_the_example(reader: Reader) -> None:
    files = {}
    for example in page_for(reader):
        if example.region.evaluator == reader.writes:
            first, _, text = example.parsed.partition("\n")
            files[first.removeprefix("# ")] = text.strip()
    assert len(files) > 6
    for name, text in files.items():
        assert text in (SHOP / name).read_text(), name
