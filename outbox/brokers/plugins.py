"""Find an implementation by group and name among the installed distributions."""

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points, metadata
from typing import Any

from pillarbox.outbox.errors import ConfigError, UnknownImplementationError
from pillarbox.outbox.url import scheme_of


def implementation(group: str, url: str) -> Any:
    """Load what is registered in `group` for the scheme of `url`, to call it with that.

    Raises:
        UnknownImplementationError: nothing is registered for the scheme; the message
            lists the schemes that are.
        ConfigError: it is installed, but the client library it needs is not; or the URL
            is empty.
    """
    scheme = scheme_of(url)
    kind = group.rpartition(".")[2].removesuffix("s")
    if not url:
        raise ConfigError(
            f"the URL of the {kind} is empty; pass one such as redis://broker.example"
        )
    found = {point.name: point for point in entry_points(group=group)}
    if scheme not in found:
        raise UnknownImplementationError(
            f"no {kind} for the scheme {scheme!r}; installed: "
            f"{', '.join(sorted(found)) or 'none'}; install the extra for your broker: "
            f"pip install 'pillarbox[…]' with one of "
            f"{', '.join(_extras(found.values()))}"
        )
    point = found[scheme]
    try:
        return point.load()
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the {kind} {scheme!r} needs the module {error.name!r}: "
            f"run pip install 'pillarbox[{_extra(point)}]'"
        ) from error


def _extra(point: EntryPoint) -> str:
    # A broker with several schemes has a single extra, named after its module.
    return point.module.rpartition(".")[2]


def _extras(points: Iterable[EntryPoint]) -> list[str]:
    provided = metadata("pillarbox").get_all("Provides-Extra") or []
    return sorted({_extra(point) for point in points}.intersection(provided))
