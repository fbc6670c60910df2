"""The names of an installation's roles and of pg_partman's schema."""

import re
from dataclasses import dataclass
from typing import Final

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.logs.printable import STRING, for_sql

ROLES: Final = (
    "owner",
    "maintainer",
    "detacher",
    "application",
    "relay",
    "reader",
    "operator",
    "consumer",
    "monitor",
    "web",
)
"""Every role, without its prefix."""
_PLAIN_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that differ between installations.

    Attributes:
        role_prefix: put before `_owner`, `_relay` and so on, so that two
            applications can share a cluster.
        partman_schema: the schema where pg_partman is or will be installed; None: the
            installation does without it.
    """

    role_prefix: str = "pillarbox"
    partman_schema: str | None = "partman"

    def check(self) -> None:
        """Reject names that aren't plain, since they end up in DDL.

        Raises:
            ConfigError: a name isn't plain; the message names the parameter.
        """
        for name in ("role_prefix", "partman_schema"):
            value = getattr(self, name)
            if value is not None and not _PLAIN_NAME.fullmatch(value):
                raise ConfigError(
                    f"{name}={value!r}: use at most 40 lower-case letters,"
                    " digits and underscores, and don't begin with a digit"
                )

    def role(self, name: str) -> str:
        """Return the name of one of `ROLES` with its prefix."""
        return f"{self.role_prefix}_{name}"

    def fill(self, script: str) -> str:
        """Replace `{owner}` with the quoted role, `{owner_name}` with a literal.

        Without pg_partman, `{partman_name}` is NULL.
        """
        names = {role: self.role(role) for role in ROLES}
        if self.partman_schema is None:
            script = script.replace("{partman_name}", "NULL")
        else:
            names["partman"] = self.partman_schema
        for placeholder, name in names.items():
            script = script.replace(f"{{{placeholder}}}", for_sql(name))
            script = script.replace(f"{{{placeholder}_name}}", for_sql(name, STRING))
        return script
