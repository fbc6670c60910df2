"""Writers that use almost no processor time themselves: PostgreSQL's pgbench."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from pillarbox.outbox.errors import ConfigError, OutboxError
from pillarbox.outbox.testing.cluster import server_directories

TRANSACTION = f"""
BEGIN;
INSERT INTO bench_order (customer, total) VALUES ('someone', 1);
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
VALUES (gen_random_uuid(), 16, 'orders.placed', 'order-1', 'text/plain',
        '{"x" * 300}');
COMMIT;
"""
TABLE = """
CREATE TABLE bench_order (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text, total int
)
"""


def transactions_a_second(
    database_url: str,
    *,
    clients: int,
    seconds: int,
    transaction: str = TRANSACTION,
    at_most: int | None = None,
) -> float:
    """Run clients that write one row of their own and one message per transaction.

    Execute `TABLE` in the database first.
    """
    with TemporaryDirectory() as directory:
        script = Path(directory) / "transaction.sql"
        script.write_text(transaction)
        done = subprocess.run(
            [
                program(),
                "--no-vacuum",
                "--protocol=prepared",
                f"--client={clients}",
                f"--time={seconds}",
                f"--file={script}",
                *([] if at_most is None else [f"--rate={at_most}"]),
                database_url,
            ],
            capture_output=True,
            check=False,
            text=True,
        )
    rate = re.search(r"^tps = ([\d.]+)", done.stdout, re.MULTILINE)
    if done.returncode or rate is None:
        raise OutboxError(f"pgbench ended with {done.returncode}: {done.stderr}")
    return float(rate[1])


def program() -> Path:
    """Return the pgbench of the newest server on this machine."""
    for directory in server_directories():
        if (directory / "pgbench").exists():
            return directory / "pgbench"
    raise ConfigError(
        "pgbench is missing, which the writers need; install PostgreSQL's server "
        "package (Debian 12: postgresql-15, Debian 13: postgresql-17)"
    )
