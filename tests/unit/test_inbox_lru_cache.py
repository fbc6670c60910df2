"""Notes on recent ids: bounded, the oldest forgotten first."""

from inbox.consuming.backlog import LruCache
from outbox import uuid7


def test_the_oldest_notes_are_forgotten() -> None:
    first, second, third = uuid7(), uuid7(), uuid7()
    recent: LruCache[int] = LruCache(max_ids=2)
    recent.note(first, 1)
    recent.note(second, 2)
    recent.note(first, 10)
    recent.note(third, 3)
    assert [recent.get(id) for id in (first, second, third)] == [10, None, 3]


def test_a_note_can_be_forgotten_twice() -> None:
    id = uuid7()
    recent: LruCache[int] = LruCache()
    recent.note(id, 1)
    recent.forget(id)
    recent.forget(id)
    assert recent.get(id) is None
