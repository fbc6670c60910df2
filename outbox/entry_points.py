"""Find an implementation by group and name among the installed distributions."""

from importlib.metadata import entry_points
from typing import Any

from outbox.errors import ConfigError, UnknownImplementationError


def implementation(group: str, url: str) -> Any:
    """Load the class registered in `group` for the scheme of `url`.

    Raises:
        UnknownImplementationError: none of that name; the message lists what is.
        ConfigError: it is installed, but the client library it needs is not.
    """
    scheme = url.partition(":")[0]
    kind = group.rpartition(".")[2].removesuffix("s")
    found = {point.name: point for point in entry_points(group=group)}
    if scheme not in found:
        raise UnknownImplementationError(
            f"no {kind} for the scheme {scheme!r}; installed: "
            f"{', '.join(sorted(found)) or 'none'}"
        )
    point = found[scheme]
    try:
        return point.load()
    except ModuleNotFoundError as error:
        # A broker with several schemes has one extra, named like its module.
        extra = point.module.rpartition(".")[2]
        raise ConfigError(
            f"the {kind} {scheme!r} needs the module {error.name!r}: "
            f"run pip install 'pillarbox[{extra}]'"
        ) from error
