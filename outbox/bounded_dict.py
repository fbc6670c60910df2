"""A dictionary that drops its oldest entries."""

from typing import Final, TypeVar

from typing_extensions import override

K = TypeVar("K")
V = TypeVar("V")

_LIMIT: Final = 10_000


class BoundedDict(dict[K, V]):
    """A dictionary in the order in which keys were last set.

    Beyond `limit` entries the oldest are dropped, also if `setdefault` adds one. Not
    safe to share between threads.
    """

    def __init__(self, limit: int = _LIMIT) -> None:
        super().__init__()
        self._limit = limit

    @override
    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._limit:
            del self[next(iter(self))]

    @override
    def setdefault(self, key: K, default: V) -> V:
        if key not in self:
            self[key] = default
        return self[key]
