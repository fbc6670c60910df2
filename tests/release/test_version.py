"""The version is the tag's, wherever the wheel is built."""

import subprocess
import sys
import tarfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.install.wheel import ROOT, copy_source

_PREPARE = (
    "import sys; from setuptools.build_meta import prepare_metadata_for_build_wheel"
    " as prepare; prepare(sys.argv[1])"
)


def version_of(source: Path, folder: Path) -> str:
    folder.mkdir()
    run(source, sys.executable, "-c", _PREPARE, str(folder))
    (metadata,) = folder.glob("*.dist-info/METADATA")
    return str(HeaderParser().parsestr(metadata.read_text())["Version"])


def run(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        arguments, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=Tester", "-c", "user.email=tester@example.com")
    run(folder, "git", *who, *arguments)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of what the wheel is built from."""
    return copy_source(tmp_path)


def test_a_copy_without_git_has_no_version(source: Path, tmp_path: Path) -> None:
    assert version_of(source, tmp_path / "built") == "0.0.0"


@pytest.mark.long
def test_a_tag_is_the_version_and_commits_after_it_are_of_the_next_one(
    source: Path, tmp_path: Path
) -> None:
    (source / ".gitignore").write_bytes((ROOT / ".gitignore").read_bytes())
    git(source, "init", "--quiet")
    git(source, "add", ".")
    git(source, "commit", "--quiet", "--message=first")
    git(source, "tag", "v1.2.3")
    # It is no version.
    git(source, "tag", "phase-9")
    assert version_of(source, tmp_path / "tagged") == "1.2.3"

    run(source, sys.executable, "-m", "build", "--sdist", "--no-isolation")
    with tarfile.open(source / "dist" / "pillarbox-1.2.3.tar.gz") as archive:
        archive.extractall(tmp_path)
    sdist = tmp_path / "pillarbox-1.2.3"
    assert version_of(sdist, tmp_path / "of_sdist") == "1.2.3"

    git(source, "commit", "--quiet", "--allow-empty", "--message=second")
    assert version_of(source, tmp_path / "later").startswith("1.2.4.dev1+g")
