"""What `pillarbox dev` keeps in a project."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from pillarbox.outbox.dev.project import Project
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.web.login import read_tokens


@pytest.fixture
def root() -> Iterator[Path]:
    """A directory that every user can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has another user's server")
def test_a_project_that_the_server_cannot_enter_has_its_folder_elsewhere(
    root: Path,
) -> None:
    root.chmod(0o700)
    inside = root / "shop"
    inside.mkdir()

    folder = Project(inside).folder

    assert folder.parent == Path("/var/lib/pillarbox")
    assert folder.name == str(inside).replace("/", "%2F")


def test_the_url_and_the_token_stay_until_the_project_is_erased(root: Path) -> None:
    project = Project(root)
    with project.locked():
        url, token = project.url, project.token
        assert (root / ".pillarbox" / ".gitignore").read_text() == "*\n"
        for name in ("url", "tokens"):
            mode = (project.folder / name).stat().st_mode
            assert mode & 0o077 == 0, "other users can't read it"
        assert (Project(root).url, Project(root).token) == (url, token)
        (viewer,) = read_tokens(str(project.tokens)).values()
        assert [it for it in fields(viewer) if not getattr(viewer, it.name)] == []

        project.data.mkdir()
        project.erase()

        assert not project.data.exists()
        assert project.url != url
        assert project.token != token


def test_a_folder_that_came_with_the_project_is_refused(root: Path) -> None:
    programs = root / ".pillarbox" / "bin"
    programs.mkdir(parents=True)
    (root / ".pillarbox" / "server").write_text(f"{programs}/postgres\n")
    with pytest.raises(ConfigError, match="came with the project"):
        Project(root).locked().__enter__()

    shutil.rmtree(root / ".pillarbox")
    with Project(root).locked():
        Project(root).erase()
    with Project(root).locked():
        pass


def test_a_project_has_one_dev_at_a_time(root: Path) -> None:
    with Project(root).locked(), pytest.raises(ConfigError, match="another"):
        Project(root).locked().__enter__()
    with Project(root).locked():
        pass
