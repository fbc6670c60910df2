"""A wheel built from a copy of the tree, so that nothing is left in the tree."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
MOUNTS = {
    "outbox": "outbox",
    "relay": "relay",
    "inbox": "inbox",
    "migrations": "outbox/migrations",
}
"""Where each folder of the tree ends up in the wheel."""
MODULE = "pillarbox.py"
"""The module that stands alone, at the root of both."""


def build_wheel(folder: Path) -> Path:
    """Build it with what is installed; an empty `folder` gets source and wheel."""
    source = folder / "source"
    for name in MOUNTS:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", MODULE, "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    subprocess.run(
        [*build, "--outdir", folder, source], check=True, capture_output=True
    )
    (path,) = folder.glob("*.whl")
    return path
