"""Everything but this check is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

LINK = Path(__file__).parent / "pillarbox" / "outbox"

if LINK.is_file():
    raise SystemExit(
        f"{LINK} is a file, but has to be a symbolic link, which this copy of the "
        "repository has lost: clone it with Git instead of unpacking a zip file; on "
        "Windows turn the Developer Mode on, and run git clone -c core.symlinks=true"
    )

setup()
