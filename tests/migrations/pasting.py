"""Paste what the doctor says: SQL into psql, commands into a shell."""

import re
import shlex
import subprocess
from contextlib import redirect_stdout
from io import StringIO

from outbox.cli.main import main

_SQL = re.compile(r"[A-Z]{3,} ?[^;]*;.*")


def paste(url: str, remedy: str) -> str:
    """Run a remedy to its end; give what was printed."""
    if remedy.startswith("pillarbox "):
        _, *words = shlex.split(remedy, comments=True)
        with redirect_stdout(StringIO()) as output:
            assert main([*words, "--database", url]) == 0
        return output.getvalue()
    assert _SQL.fullmatch(remedy), f"nothing to paste: {remedy}"
    done = subprocess.run(
        ["psql", "-X", "-q", "-t", "-A", "-v", "ON_ERROR_STOP=1", url],
        input=remedy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
