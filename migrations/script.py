"""Run one SQL file of the migrations, with the names of this installation filled in."""

import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from alembic import context, op
from sqlalchemy import text

from outbox.errors import ConfigError
from outbox.migrations.statements import split_statements

_PLAIN_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_ROLES: Final = (
    "owner",
    "maintainer",
    "detacher",
    "application",
    "relay",
    "consumer",
    "monitor",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What is called differently from one installation to the next.

    Attributes:
        role_prefix: put before `_owner`, `_relay` and so on, so that two
            applications can share a cluster.
        partman_schema: where pg_partman is, or is to be, installed.
    """

    role_prefix: str = "pillarbox"
    partman_schema: str = "partman"

    def __post_init__(self) -> None:
        """Take plain names only: they end in DDL."""
        for name in ("role_prefix", "partman_schema"):
            value = getattr(self, name)
            if not _PLAIN_NAME.fullmatch(value):
                raise ConfigError(
                    f"{name}={value!r}: use at most 40 lower-case letters,"
                    " digits and underscores, and no digit first"
                )

    def fill(self, script: str) -> str:
        """Replace `{owner}` by the quoted role, `{owner_name}` by it as a string."""
        names = {role: f"{self.role_prefix}_{role}" for role in _ROLES}
        names["partman"] = self.partman_schema
        for placeholder, name in names.items():
            script = script.replace(f"{{{placeholder}}}", f'"{name}"')
            script = script.replace(f"{{{placeholder}_name}}", f"'{name}'")
        return script


def run(file: str, **values: str) -> None:
    """Run, or print in offline mode, the statements of a file of this package.

    A `{name}` of the values becomes that string, without quotes in it.
    """
    script = files("outbox.migrations").joinpath(file).read_text(encoding="utf-8")
    names = context.config.attributes.get("names", Names())
    for name, value in values.items():
        script = script.replace(f"{{{name}}}", f"'{value}'")
    for statement in split_statements(names.fill(script)):
        # text() would read a single colon before a word as a parameter.
        op.execute(text(re.sub(r"(?<![:\w]):(?=\w)", r"\\:", statement)))
