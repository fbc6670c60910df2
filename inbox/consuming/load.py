"""Find a consumer by its path, and the queues that it serves."""

import sys
from collections.abc import Sequence

from pillarbox.inbox.consumer import Consumer
from pillarbox.outbox.errors import ConfigError, one_line
from pillarbox.outbox.import_path import import_object, where


def queues_of(options: Sequence[str]) -> dict[str, int]:
    """Parse `NAME=WEIGHT`, or `NAME` for a weight of 1.

    Raises:
        ConfigError: a weight isn't a whole number, or a name is repeated.
    """
    queues: dict[str, int] = {}
    for option in options:
        name, separator, weight = option.partition("=")
        if name in queues:
            raise ConfigError(f"--queue {option}: {name!r} was given twice")
        try:
            queues[name] = int(weight) if separator else 1
        except ValueError:
            raise ConfigError(
                f"--queue {option}: weight {weight!r} is not a whole number; "
                "write NAME=WEIGHT, e.g. realtime=2"
            ) from None
    return queues


def load_consumer(path: str) -> Consumer:
    """Import the consumer `module:name`, also from the working directory.

    Raises:
        ConfigError: as `import_object`, or it is neither a consumer nor a function that
            returns one.
    """
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python -m` does, to find the user's modules
    found = import_object("consumer", path)
    if callable(found) and not isinstance(found, Consumer):
        try:
            found = found()
        except Exception as error:
            raise ConfigError(
                f"consumer {path!r}: {path.partition(':')[2]!r} raised "
                f"{one_line(error, with_text=True)} ({where(error)})"
            ) from error
    if not isinstance(found, Consumer):
        raise ConfigError(
            f"consumer {path!r}: must be a Consumer, or a function that returns one,"
            f" not a {type(found).__name__}"
        )
    return found
