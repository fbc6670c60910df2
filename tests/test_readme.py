"""The README, followed literally by a new user with a fresh clone of the last commit.

Only `make test` runs few tests here, since it is itself what runs all of them.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Self

import pytest

from tests.fixtures.waiting import wait_for
from tests.install.__main__ import clean_environment

ROOT: Final = Path(__file__).parent.parent
README: Final = ROOT / "README.md"
BLOCK: Final = re.compile(r"^```(console|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS: Final = 900


class Terminal:
    """A shell that is typed into."""

    def __init__(self, log: Path, folder: Path, environment: dict[str, str]) -> None:
        self._log = log
        with log.open("wb") as output:
            self._shell = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "bash"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self._typed = 0

    def text(self) -> str:
        return self._log.read_text()

    def type(self, line: str, until: str | None = None) -> str:
        """Type a command; return what it prints until it ends, or until a text."""
        assert self._shell.stdin is not None
        before = len(self.text())
        self._typed += 1
        ended = re.compile(rf"^line {self._typed} ended with (\d+)$", re.MULTILINE)
        self._shell.stdin.write(f"{line}\necho line {self._typed} ended with $?\n")
        self._shell.stdin.flush()

        def printed() -> bool:
            found = ended.search(self.text())
            if found is None:
                return until is not None and until in self.text()[before:]
            if until is not None or found[1] != "0":
                pytest.fail(f"{line} ended with {found[1]}:\n{self.text()}")
            return True

        wait_for(line, printed, seconds=SECONDS)
        return self.text()[before:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Press Ctrl-C, and leave the shell."""
        assert self._shell.stdin is not None
        os.killpg(self._shell.pid, signal.SIGINT)
        self._shell.stdin.close()
        self._shell.wait(timeout=90)


def blocks(section: str) -> list[tuple[str, str]]:
    """Return the blocks of a section, each with its kind."""
    text = README.read_text().split(f"\n## {section}\n")[1].split("\n## ")[0]
    return BLOCK.findall(text)


def lines(block: str) -> list[str]:
    """Return the commands of a block, without what is said about them."""
    found = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    return [re.split(r"\s+#\s", line)[0] for line in found]


@pytest.fixture
def home() -> Iterator[Path]:
    """The home of a new user, with a clone of the last commit."""
    with TemporaryDirectory(prefix="pillarbox-home-") as name:
        home = Path(name)
        # If this is root, PostgreSQL's user must be able to enter it.
        home.chmod(0o755)
        clone = ["git", "clone", "--quiet", f"file://{ROOT}", str(home / "pillarbox")]
        subprocess.run(clone, check=True)
        yield home


@pytest.mark.variant
@pytest.mark.timeout(2 * SECONDS)
def test_the_readme_can_be_followed_literally_in_a_fresh_clone(home: Path) -> None:
    environment = {
        **clean_environment(),
        "HOME": str(home),
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        # All tests are those of the command that runs this.
        "PYTEST_ADDOPTS": "tests/relay/test_claim.py",
    }
    (_, commands), (_, install) = blocks("See it run")
    (_, application), (_, serve), (_, use), *_ = blocks("Use it")
    with (
        Terminal(home / "first.log", home / "pillarbox", environment) as first,
        Terminal(home / "second.log", home, environment) as second,
    ):
        demo, tests = (first.type(line) for line in lines(commands))
        assert "everything holds" in demo
        assert re.search(r"\d+ passed", tests)
        for line in lines(install):
            first.type(line)
        (home / "shop" / "app.py").write_text(application)
        (line,) = lines(serve)
        shown = first.type(line, until="ConsumerStarted")

        (export,) = re.findall(r"export PILLARBOX_DATABASE_URL=\S+", shown)
        *before, status, trace = lines(use)
        for line in before:
            second.type(export if line.startswith("export ") else line)
        wait_for("the message", lambda: "{'order_id': 1}" in first.text())
        assert "all well" in second.type(status)
        assert "handled" in second.type(trace)
