"""A dictionary that keeps only the entries set last."""

from pillarbox.outbox.bounded_dict import BoundedDict


def test_the_oldest_entries_are_forgotten() -> None:
    kept: BoundedDict[str, int] = BoundedDict(limit=2)
    kept["first"] = 1
    kept["second"] = 2
    kept["first"] = 10
    kept["third"] = 3
    assert kept == {"first": 10, "third": 3}


def test_a_default_is_bounded_too_and_does_not_refresh_its_key() -> None:
    kept: BoundedDict[str, int] = BoundedDict(limit=2)
    assert [kept.setdefault(key, n) for n, key in enumerate("aba")] == [0, 1, 0]
    assert kept.setdefault("c", 3) == 3
    assert kept == {"b": 1, "c": 3}
