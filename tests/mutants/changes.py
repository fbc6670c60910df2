"""The faults that can be put into a file: each replaces a few characters of it."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from typing_extensions import override

_Change: TypeAlias = tuple[int, int, str, str]
"""Where it begins and ends, the operator, and the replacement."""

_PAIRS: Final = (
    *(("<", "<="), (">", ">="), ("==", "!="), ("is", "is not"), ("in", "not in")),
    *(("and", "or"), ("AND", "OR"), ("IS NULL", "IS NOT NULL"), ("true", "false")),
    *(("+", "-"), ("min", "max"), ("least", "greatest")),
)
_SWAPS: Final = {**dict(_PAIRS), **{second: first for first, second in _PAIRS}}
_TOKEN: Final = re.compile(r"[<>=!]=|[<>+-]|\b(?:is not|is|not in|in|and|or)\b")
_UNCHANGED: Final = {"annotation", "returns", "decorator_list"}
_TUNED: Final = 10
"""Numbers from here on were chosen; one more is as good."""
_LOGS: Final = ("log_event", "logger.log")

_NO_SQL: Final = re.compile(r"--.*|'(?:[^']|'')*'|\bBETWEEN .*? AND\b")
_SQL: Final = (
    ("comparison", r"(?<= )[<>]=?(?= )"),
    ("arithmetic", r"(?<= )[+-](?= )"),
    ("boolean", r"\bAND\b|\bOR\b(?! (?:REPLACE|UPDATE|DELETE|TRUNCATE)\b)"),
    ("null", r"\bIS (?:NOT )?NULL\b"),
    ("constant", r"\b(?:true|false)\b"),
    ("extreme", r"\b(?:min|max|least|greatest)(?=\()"),
    # What isn't swapped is left out.
    ("not", r"(?<!IF )\bNOT (?=EXISTS\b|\()"),
    ("clause", r"\b(?:SKIP LOCKED|DISTINCT(?! (?:ON|FROM)\b)|DESC|LEFT(?= JOIN))\b"),
    ("clause", r"(?<=\bUNION )ALL\b|\bLIMIT (?:%\(\w+\)s|:\w+|\d+)"),
)


class Mutant(NamedTuple):
    """A file with one fault.

    Attributes:
        text: the line in which the fault begins.
        occurrence: which of the same faults in lines of this text, counted from 0.
    """

    file: str
    line: int
    operator: str
    text: str
    occurrence: int
    start: int
    end: int
    replacement: str

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What stays the same when lines move."""
        return self.file, self.text, self.operator, self.occurrence

    def of(self, source: str) -> str:
        """Return the file's text with the fault."""
        return source[: self.start] + self.replacement + source[self.end :]

    @override
    def __str__(self) -> str:
        change = f"{self.operator} -> {self.replacement!r}"
        return f"{self.file}:{self.line}  {change} in: {self.text}"


def mutants(file: str, source: str) -> Iterator[Mutant]:
    """Yield all mutants of a file, from its beginning to its end."""
    changes = _in_python if file.endswith(".py") else _in_sql
    seen: Counter[tuple[str, str]] = Counter()
    for start, end, operator, replacement in sorted(changes(source)):
        text = source[source.rfind("\n", 0, start) + 1 :].partition("\n")[0].strip()
        yield Mutant(
            file=file,
            line=source.count("\n", 0, start) + 1,
            operator=operator,
            text=text,
            occurrence=seen[text, operator],
            start=start,
            end=end,
            replacement=replacement,
        )
        seen[text, operator] += 1


def _in_sql(source: str) -> Iterator[_Change]:
    code = _NO_SQL.sub(lambda it: re.sub(".", " ", it[0]), source)
    for operator, pattern in _SQL:
        for it in re.finditer(pattern, code):
            yield *it.span(), operator, _SWAPS.get(it[0], "")
    for it in re.finditer(r"(?<![\w.$%:])\d(?![\w.])", code):
        yield *it.span(), "constant", str(int(it[0]) + 1)


def _in_python(source: str) -> Iterator[_Change]:
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(first: ast.expr | ast.stmt, last: ast.expr | ast.stmt) -> tuple[int, int]:
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        end = place(last.end_lineno, last.end_col_offset)
        return place(first.lineno, first.col_offset), end

    def swaps(operator: str, *operands: ast.expr) -> Iterator[_Change]:
        for left, right in pairwise(operands):
            start, end = span(left, left)[1], span(right, right)[0]
            gap = re.sub("#.*", lambda it: " " * len(it[0]), source[start:end])
            if token := _TOKEN.search(gap):
                begin, end = token.span()
                yield start + begin, start + end, operator, _SWAPS[token[0]]

    for node in _nodes(ast.parse(source)):
        match node:
            case ast.Compare():
                yield from swaps("comparison", node.left, *node.comparators)
            case ast.BoolOp():
                yield from swaps("boolean", *node.values)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                yield from swaps("arithmetic", node.left, node.right)
            case ast.UnaryOp(op=ast.Not()):
                start, _ = span(node, node)
                yield start, start + len("not "), "not", ""
            case ast.Constant(value=bool()):
                yield *span(node, node), "constant", str(not node.value)
            case ast.Constant(value=int(value)) if value < _TUNED:
                yield *span(node, node), "constant", str(value + 1)
            case ast.Return(value=ast.expr() as value):
                if ast.unparse(value) != "None":
                    yield *span(node, node), "return", "return None"
            case ast.Expr(value=ast.Await()):
                yield *span(node, node), "await", "pass"
            case ast.Expr(value=ast.Call()):
                yield *span(node, node), "call", "pass"
            case ast.Break():
                yield *span(node, node), "jump", "continue"
            case ast.Continue():
                yield *span(node, node), "jump", "break"
            case ast.ExceptHandler(body=[first, *_]):
                if not isinstance(first, ast.Raise):
                    yield *span(first, node.body[-1]), "except", "raise"


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes, except annotations, decorators, texts, logs and `__repr__`."""
    yield node
    for name, value in ast.iter_fields(node):
        children: Iterable[object] = value if isinstance(value, list) else [value]
        for child in children:
            if name in _UNCHANGED or not isinstance(child, ast.AST):
                continue
            match child:
                # Besides, Python 3.11 doesn't know the places in an f-string.
                case ast.JoinedStr() | ast.FunctionDef(name="__repr__"):
                    pass
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    pass
                case ast.Expr(value=ast.Call() as call) if (
                    ast.unparse(call.func) in _LOGS
                ):
                    pass
                case _:
                    yield from _nodes(child)
