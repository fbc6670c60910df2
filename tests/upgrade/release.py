"""The last release and the next one, each a wheel in a virtual environment."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.fixtures.processes import ROOT
from tests.install.wheel import build, copy_source

FIRST: Final = "13a11abaa912a6999d8cdce8381f7c6bd6243ede"
"""The last release, until there is a tag: the newest commit of main that has changed a
revision of the schema. Who changes one before the first tag moves this on."""
_REVISION: Final = '''\
"""A sample migration."""

from pillarbox.outbox.migrations.script import run

revision = "9999"
down_revision = "{newest}"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Run the SQL file."""
    run("versions/9999_sample.up.sql")
'''


@dataclass(frozen=True, slots=True)
class Release:
    """A release that is installed in a virtual environment.

    Attributes:
        name: for logs and effects.
        programs: the directory of its commands.
    """

    name: str
    programs: Path

    def line(self, program: str, *arguments: str) -> list[str]:
        """Return the arguments that run a Python script or one of its commands."""
        script = program if program.endswith(".py") else str(self.programs / program)
        return [str(self.programs / "python"), script, *arguments]


def git(*arguments: str) -> bytes:
    """Run git in this repository, and return its output."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout


def last_release() -> str:
    """Return the newest tag of a version before this commit, or what stands for it."""
    tags = git("tag", "--list", "v[0-9]*", "--merged", "HEAD~1", "--sort=-v:refname")
    return tags.decode().split()[0] if tags else FIRST


def install_last(folder: Path) -> Release:
    """Install the last release."""
    source = folder / "source"
    source.mkdir()
    archive = git("archive", last_release())
    subprocess.run(["tar", "--extract", "-C", source], input=archive, check=True)
    return _install("last", source, folder)


def install_next(folder: Path) -> Release:
    """Install this tree with one more migration, the sample."""
    source = copy_source(folder)
    versions = source / "migrations" / "versions"
    newest = max(path.name[:4] for path in versions.glob("[0-9]*.py"))
    (versions / "9999_sample.py").write_text(_REVISION.format(newest=newest))
    sample = Path(__file__).with_name("sample_migration.sql")
    shutil.copy(sample, versions / "9999_sample.up.sql")
    return _install("next", source, folder)


def _install(name: str, source: Path, folder: Path) -> Release:
    """Install a wheel beside the dependencies of this environment."""
    wheel = build("wheel", source, folder)
    environment = folder / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    # In the folder that it names, .pth files, such as that of this tree, aren't read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    programs = environment / "bin"
    pip = f"{sys.executable} -m pip --python {programs / 'python'} install".split()
    subprocess.run([*pip, "-qq", "--no-deps", "--no-index", wheel], check=True)
    return Release(name, programs)
