"""The output of commands, on a terminal and elsewhere."""

import io
import sys

import pytest
from typing_extensions import override

from pillarbox.outbox.cli.output import progress, write_table
from pillarbox.outbox.logs.printable import printable


class Terminal(io.StringIO):
    @override
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress(4) as show:
        show(1)
        show(4)

    assert "4/4" in terminal.getvalue()
    for silent, total in ((io.StringIO(), 1), (Terminal(), 0)):
        monkeypatch.setattr(sys, "stderr", silent)
        with progress(total) as show:
            show(total)
        assert silent.getvalue() == "", "in a file, or for no work"


def test_a_table_in_a_pipe_has_a_whole_line_for_each_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    long = "x" * 500
    write_table(["name", "n"], [["two\nlines", 1], [None, 23], [long, 4]])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["name", "n"]
    assert [row.split() for row in rows] == [
        ["two", "lines", "1"],
        ["-", "23"],
        [long, "4"],
    ]
    assert {row.index(row.split()[-1]) for row in rows} == {head.index("n", 1)}
    write_table(["key"], [["[red]k[/red] :smile: \x1b[31m"]])
    _, row = capsys.readouterr().out.splitlines()
    assert row == "[red]k[/red] :smile: \\x1b[31m", "markup is printed literally"


def test_a_table_on_a_terminal_folds_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    write_table(["id", "reason"], [["7", "y" * 60]])
    _, *rows = terminal.getvalue().splitlines()
    assert [len(row) <= 40 for row in rows] == [True, True]
    assert "".join(rows).count("y") == 60


def test_control_sequences_are_escaped() -> None:
    assert printable("\x1b[31mred\x07\u202e") == "\\x1b[31mred\\x07\\u202e"
    assert printable("C1 \x9b2J") == "C1 \\x9b2J"
    assert printable("one\r\ntwo\u2028three") == "one\\r\\ntwo\\u2028three"
    assert printable("ä 中 🏳") == "ä 中 🏳"
    assert printable("one\n\ttwo\r\x1b", lines=True) == "one\n\ttwo\\r\\x1b"
