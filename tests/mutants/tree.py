"""A copy of the last commit, in which tests run with a fault."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import cache_from_source
from pathlib import Path
from typing import Final, NamedTuple

from tests.mutants.changes import Mutant
from tests.mutants.nearest import nearest_tests

ROOT: Final = Path(__file__).parents[2]
_PRODUCT: Final = re.compile(r"(outbox|inbox|relay|migrations)/(?!testing/|demo/)")
_TESTS: Final = re.compile(r"tests/(?!benchmarks/|containers/).*\btest_\w+\.py")
_COLLECT: Final = "--collect-only"
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """What the tests say about a mutant.

    Attributes:
        result: `found`; `survived`, if all tests passed; or `timeout`, if those did
            that ran in time, so that nothing was found.
        test: the first that failed; None if the tests couldn't even start.
    """

    result: str
    test: str | None
    seconds: float


class Tree:
    """A copy of the last commit, for one mutant at a time."""

    def __init__(self, path: Path, seconds: float) -> None:
        listed = subprocess.check_output(["git", "ls-files"], cwd=path, text=True)
        texts = {
            file: (path / file).read_text()
            for file in listed.splitlines()
            if file.endswith((".py", ".sql"))
        }
        self.product = {file: texts[file] for file in texts if _PRODUCT.match(file)}
        self._tests = {file: texts[file] for file in texts if _TESTS.match(file)}
        self._path = path
        self._seconds = seconds
        self._is_sound: dict[str, bool] = {}

    def outcome(self, mutant: Mutant) -> Outcome:
        """Run the tests near a mutant, until one fails that passes without it."""
        source = self.product[mutant.file]
        tests = nearest_tests(mutant.file, self.product, self._tests)
        while True:
            self._write(mutant.file, mutant.of(source))
            try:
                outcome = self._run(*tests)
            finally:
                self._write(mutant.file, source)
            if outcome.result != "found" or self._passes(outcome.test or _COLLECT):
                return outcome
            if outcome.test is None:
                raise SystemExit("the tests don't start, even without a fault")

    def _passes(self, test: str) -> bool:
        if test not in self._is_sound:
            self._is_sound[test] = self._run(test).result == "survived"
        return self._is_sound[test]

    def _run(self, *tests: str) -> Outcome:
        """Run tests, except those that failed without a fault."""
        options = ["-xq", "--tb=no", "-p", "no:randomly", "-p", "no:cacheprovider"]
        # A test that lasts half of the time fails: the fault makes it wait for ever.
        options += [f"--timeout={self._seconds / 2}"]
        unsound = [test for test, is_sound in self._is_sound.items() if not is_sound]
        options += [f"--deselect={test}" for test in unsound]
        begun = time.monotonic()
        # A file, since a server that outlives pytest would keep a pipe open.
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=self._path,
                # Comes before the environment's editable installation.
                env={**os.environ, "PYTHONPATH": str(self._path)},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                result = "found" if process.wait(timeout=self._seconds) else "survived"
            except subprocess.TimeoutExpired:
                stop(process)
                result = "timeout"
            output.seek(0)
            failed = _FAILED.search(output.read()) if result == "found" else None
        test = failed[1] if failed else None
        return Outcome(result, test, round(time.monotonic() - begun, 1))

    def _write(self, file: str, source: str) -> None:
        path = self._path / file
        path.write_text(source)
        # Python compares only the size and the second, and both can be the same.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Let pytest stop the servers that it started, and end what is left."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def tree(seconds: float) -> Iterator[Tree]:
    """Check the last commit out for the duration of the block."""
    with tempfile.TemporaryDirectory(prefix="pillarbox-mutants-") as directory:
        path = Path(directory) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", path, "HEAD"], check=True)
        try:
            yield Tree(path, seconds)
        finally:
            subprocess.run([*git, "remove", "--force", path], check=True)
