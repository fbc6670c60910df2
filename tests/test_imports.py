"""What `import outbox` costs an application that only writes messages."""

import subprocess
import sys
import tomllib
from pathlib import Path

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
WRITER = "the writer imports only its own modules"


def loaded(module: str = "outbox") -> set[str]:
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return set(said.stdout.split())


def writers_modules() -> set[str]:
    contracts = tomllib.loads(PYPROJECT.read_text())["tool"]["importlinter"][
        "contracts"
    ]
    (contract,) = (c for c in contracts if c["name"] == WRITER)
    return set(contract["source_modules"])


def test_import_outbox_loads_the_writers_modules_and_no_others() -> None:
    ours = {name for name in loaded() if name.partition(".")[0] == "outbox"}
    assert ours == writers_modules() | {"outbox"}


def test_import_outbox_loads_sqlalchemy_and_the_standard_library() -> None:
    others = {name.partition(".")[0] for name in loaded() - loaded("sqlalchemy")}
    assert others - sys.stdlib_module_names == {"outbox", "sqlalchemy"}


def test_import_outbox_loads_no_driver() -> None:
    assert not {"psycopg", "asyncpg", "sqlalchemy.ext.asyncio"} & loaded()
