"""Builds a wheel from a copy of the tree, which leaves no files in the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MOUNTS = {
    "pillarbox": "pillarbox",
    "outbox": "outbox",
    "relay": "relay",
    "inbox": "inbox",
    "migrations": "outbox/migrations",
}
"""The place of each folder of the tree in the wheel."""


def copy_source(folder: Path) -> None:
    """Copy what the wheel is built from, without git."""
    for name in MOUNTS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def build_wheel(folder: Path) -> Path:
    """Build the wheel with installed tools; an empty `folder` gets source and wheel."""
    source = folder / "source"
    copy_source(source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    subprocess.run(
        [*build, "--outdir", folder, source], check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return path
