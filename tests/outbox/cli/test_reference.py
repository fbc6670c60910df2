"""The reference page of the commands."""

from docs.reference.__main__ import PAGE, page


def test_the_page_is_what_the_code_gives() -> None:
    assert PAGE.read_text() == page(), "run `make reference`"
