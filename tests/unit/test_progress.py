"""The bar is for terminals only."""

import io

from typing_extensions import override

from outbox.cli.progress import Progress
from outbox.cli.table import draw_table, printable


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_how_much_is_done() -> None:
    terminal = Terminal()
    progress = Progress(4, terminal)
    progress.show(1, {"succeeded": 1, "failed": 0})
    progress.show(4, {"succeeded": 3, "failed": 1})
    progress.end()

    first, last = terminal.getvalue().split("\r")[1:]
    assert first.startswith("[#######.......................] 1/4")
    assert last.startswith("[##############################] 4/4")
    assert last.endswith("3 succeeded  1 failed\x1b[K\n")


def test_a_file_sees_nothing_of_it() -> None:
    file = io.StringIO()
    progress = Progress(1, file)
    progress.show(1, {"succeeded": 1})
    progress.end()
    assert file.getvalue() == ""


def test_nothing_to_do_draws_nothing() -> None:
    terminal = Terminal()
    progress = Progress(0, terminal)
    progress.show(0, {})
    progress.end()
    assert terminal.getvalue() == ""


def test_a_table_has_one_line_for_each_row_whatever_is_in_it() -> None:
    drawn = draw_table(["name", "n"], [["two\nlines", 1], [None, 23]])
    assert drawn == "name       n\ntwo lines  1\n-          23\n"


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("\x1b[31mred\x07\u202e") == "\\x1b[31mred\\x07\\u202e"
    assert printable("C1 \x9b2J") == "C1 \\x9b2J"
    assert printable("one\r\ntwo\u2028three") == "one\\r\\ntwo\\u2028three"
    assert printable("ä 中 🏳") == "ä 中 🏳"


def test_lines_of_a_text_stay_if_asked_for() -> None:
    assert printable("one\n\ttwo\r\x1b", lines=True) == "one\n\ttwo\\r\\x1b"
