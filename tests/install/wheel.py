"""Builds distributions from a copy of the tree, which leaves no files in the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MOUNTS = {
    "pillarbox": "pillarbox",
    "outbox": "pillarbox/outbox",
    "relay": "pillarbox/relay",
    "inbox": "pillarbox/inbox",
    "migrations": "pillarbox/outbox/migrations",
}
"""The place of each folder of the tree in the wheel."""


def copy_source(folder: Path) -> Path:
    """Copy what a distribution is built from, without git; return the copy."""
    source = folder / "source"
    for name in MOUNTS:
        shutil.copytree(
            ROOT / name,
            source / name,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a `wheel` or an `sdist` with installed tools.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation"]
    ended = subprocess.run(
        [*command, "--outdir", folder, source],
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{ended.stdout}{ended.stderr}")
    (path,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return path


def build_wheel(folder: Path) -> Path:
    """Build the wheel; an empty `folder` gets source and wheel."""
    return build("wheel", copy_source(folder), folder)
