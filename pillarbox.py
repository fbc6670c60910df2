"""The console script `pillarbox`: checks what it is about to import, and imports it.

It depends on no package of ours, so that it can be imported even if a package of the
application, earlier on Python's path, hides one of ours.
"""

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("outbox", "relay", "inbox")
_FAILED = 2


def main() -> int:
    """Run a command and return its exit status."""
    for name, theirs, ours in _hidden():
        sys.stderr.write(
            f"pillarbox: the package {name!r} at {theirs} hides pillarbox's own at "
            f"{ours}: rename it, or take {theirs.parent} from PYTHONPATH\n"
        )
        return _FAILED
    try:
        import typer as typer
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"pillarbox: the command line needs {error.name}: pip install "
            "'pillarbox[cli]'\n"
        )
        return _FAILED
    from outbox.cli.main import main as run

    return run()


def _hidden() -> Iterator[tuple[str, Path, Path]]:
    """Yield each package of ours that another one hides, with its path and ours."""
    for name in _PACKAGES:
        ours = Path(__file__).resolve().parent / name
        spec = find_spec(name)
        if spec is None or spec.origin is None or not ours.is_dir():
            continue
        origin = Path(spec.origin).resolve()
        theirs = origin.parent if origin.name == "__init__.py" else origin
        if theirs != ours:
            yield name, theirs, ours


if __name__ == "__main__":
    sys.exit(main())
