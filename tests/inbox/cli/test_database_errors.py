"""What `jobs` and `cancel` say if the database can't serve them."""

import pytest

from pillarbox import uuid7
from pillarbox.outbox.cli.main import main
from tests.acceptance.relays import as_role


@pytest.mark.parametrize(
    "command",
    [
        ("jobs",),
        ("cancel", str(uuid7()), "--consumer", "billing"),
    ],
    ids=lambda command: command[0],
)
def test_the_error_is_one_line_with_a_remedy(
    command: tuple[str, ...],
    empty_database_url: str,
    database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for url, *words in (
        (empty_database_url, "run pillarbox migrate"),
        (
            as_role(database_url, "pillarbox_relay"),
            "permission denied",
            "grant the role pillarbox_consumer to its user",
        ),
        (
            "postgresql://jane:secret@127.0.0.1:1/shop",
            "can't reach the database postgresql://jane",
        ),
    ):
        assert main([*command, "--database", url]) == 2
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n")) == ("", 1)
        for word in words:
            assert word in printed.err
        assert "secret" not in printed.err
