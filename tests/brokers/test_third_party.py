"""A third-party adapter, installed from outside the tree, passes the suites."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[2] / "examples" / "acme_broker"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with only the sample, built and installed."""
    source = tmp_path_factory.mktemp("source") / "acme_broker"
    shutil.copytree(SAMPLE, source, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index"]
    subprocess.run(
        [*command, "--no-build-isolation", "--target", str(target), str(source)],
        check=True,
        capture_output=True,
    )
    return target


def run(installed: Path, directory: Path, *command: str) -> str:
    """Run a Python module with the sample on its path; return its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", *command],
        cwd=directory,
        env={
            **os.environ,
            "PYTHONPATH": str(installed),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(600)
def test_the_sample_passes_both_suites_with_plain_pytest(
    installed: Path, tmp_path: Path
) -> None:
    shutil.copy(SAMPLE / "test_acme_broker.py", tmp_path)
    report = run(
        installed, tmp_path, "pytest", "-q", "-rs", "-W", "error", "test_acme_broker.py"
    )
    summary = report.splitlines()[-1]
    assert "failed" not in summary
    assert "passed" in summary
    assert "declared absent: stalls. The broker can hang" in report
