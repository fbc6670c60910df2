"""The reference page of the Python API, generated from signatures and docstrings."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, Final, get_type_hints

import pillarbox
from pillarbox.inbox.consumer import HandlerOptions
from pillarbox.outbox.message import Details

PAGE: Final = Path(__file__).parent / "api.md"

_GROUPS: Final = {
    "Writing": (
        "add Message insert_statement cancel Cancelled TooLate UnknownMessage event "
        "SchemaRegistry REGISTRY PayloadCodec jsonable uuid7 sqlalchemy_url conninfo "
        "LeaveOut"
    ),
    "Consuming": (
        "idempotent guard record_receipt message_id ForeignId Consumer WebhookApp Job "
        "AsyncJob RetryLater DeadLetter"
    ),
    "The relay": "Relay RelayConfig RetryPolicy Event instrument",
    "Errors": (
        "OutboxError InvalidMessageError ConfigError HandlerTransactionError "
        "DatabaseUnavailableError BrokerUnavailableError UnsentMessagesWarning"
    ),
    "Adapters": "Publisher Acked Nacked Source Delivery",
}
_GIVEN: Final = {
    *_GROUPS["Errors"].split(),
    *("Job", "AsyncJob", "Event", "Delivery", "Source", "Publisher", "PayloadCodec"),
}
_OPTIONS: Final = {"Details": Details, "HandlerOptions": HandlerOptions}
_INTRODUCTION: Final = """\
# Python

<!-- Written by `make reference` from the code. -->

The names that `from pillarbox import …` provides. A broker's options are [on their own
page](brokers.md), and so are the [events](events.md) that observers receive.
"""
_SECTION: Final = re.compile(r"^(Args|Attributes|Raises|Returns):$", re.MULTILINE)
_ENTRY: Final = re.compile(r"^ {4}(\w+): ((?:.|\n {5,}|\n+(?= {8}))+)", re.MULTILINE)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_WIDTH: Final = 90


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function or field of a class, as its source has it."""

    name: str
    kind: str
    default: str
    keyword_only: bool = False


def page() -> str:
    """Return the whole page."""
    parts = [_INTRODUCTION]
    for group, names in _GROUPS.items():
        parts.append(f"## {group}\n")
        parts += [_section(name) for name in names.split()]
    return "\n".join(parts)


def documented() -> list[str]:
    """Return the names on the page."""
    return " ".join(_GROUPS.values()).split()


def heading(name: str) -> str:
    """Return the heading of a name."""
    value = getattr(pillarbox, name)
    if inspect.isroutine(value):
        return f"{name}()"
    if not inspect.isclass(value):
        return name
    return f"{'exception' if issubclass(value, BaseException) else 'class'} {name}"


def parameters(name: str) -> dict[str, str]:
    """Return the parameters of a function or class, each with its description."""
    value = getattr(pillarbox, name)
    described = _described(value)
    return {it.name: described.get(it.name.strip("*"), "") for it in _parameters(value)}


def _described(value: Any) -> dict[str, str]:
    described: dict[str, str] = {}
    for each in [*reversed(_dataclasses(value)), value]:
        _, sections = _split(inspect.getdoc(each) or "")
        described |= _entries(sections.get("Args", "") + sections.get("Attributes", ""))
    return described


def _dataclasses(value: Any) -> list[type]:
    """Return a dataclass and those that it extends."""
    classes: tuple[type, ...] = getattr(value, "__mro__", ())
    return [it for it in classes if "__dataclass_fields__" in vars(it)]


def _section(name: str) -> str:
    value = getattr(pillarbox, name)
    if not inspect.isclass(value) and not inspect.isroutine(value):
        kind = type(value).__name__
        text = "The registry that `add` and a `Consumer` use by default."
        return f"### {heading(name)}\n\nA `{kind}`. {text}\n"
    parts = [f"### {heading(name)}\n"]
    if not _is_given(value):
        parts.append(f"{_usage(name, value)}\n")
    parts.append(_body(value, parameters(name)))
    if inspect.isclass(value):
        parts += [_member(name, key, member) for key, member in _members(value)]
    return "\n".join(parts)


def _member(owner: str, name: str, member: Any) -> str:
    if isinstance(member, property):
        text, _ = _split(inspect.getdoc(member) or "")
        return f"#### {owner}.{name}\n\n{text}\n"
    function = inspect.unwrap(getattr(member, "__func__", member))
    described = _described(function)
    shown = {it.name: described.get(it.name, "") for it in _parameters(function)}
    usage = _usage(f"{owner}.{name}", function)
    return f"#### {owner}.{name}()\n\n{usage}\n\n{_body(function, shown)}"


def _body(value: Any, described: dict[str, str]) -> str:
    """Return the text of a docstring, with its parameters as a table."""
    text, sections = _split(inspect.getdoc(value) or "")
    parts = [text, ""]
    if described:
        parts.append("| parameter | type | default | |\n|---|---|---|---|")
        for it in _parameters(value):
            cells = (it.name, it.kind, it.default)
            code = (f"`{_cell(cell)}`" if cell else "" for cell in cells)
            parts.append(f"| {' | '.join(code)} | {_cell(described[it.name])} |")
            parts += _options(_OPTIONS[it.kind]) if it.kind in _OPTIONS else []
        parts.append("")
    if "Returns" in sections:
        parts.append(f"Returns {' '.join(sections['Returns'].split())}\n")
    if raised := _entries(sections.get("Raises", "")):
        parts.append("Raises:\n")
        parts += [f"- `{name}`: {meaning}" for name, meaning in raised.items()]
        parts.append("")
    return re.sub(r"\|  +\|", "| |", "\n".join(parts)).replace("|  |", "| |")


def _options(kind: type) -> Iterator[str]:
    """Yield the rows of the keyword arguments that a TypedDict describes."""
    described = parameters("Message") if kind is Details else _described(kind)
    for name, of in get_type_hints(kind).items():
        shown = of.__name__ if inspect.isclass(of) else str(of)
        shown = re.sub(r"\b(?:\w+\.)+(?=\w)", "", shown)
        yield f"| … `{name}` | `{_cell(shown)}` | | {_cell(described[name])} |"


def _usage(name: str, value: Any) -> str:
    """Return a call as indented code, with no types: the table has them."""
    found = _parameters(value)
    shown = [f"{it.name}={it.default}" if it.default else it.name for it in found]
    first = next((at for at, it in enumerate(found) if it.keyword_only), None)
    if first is not None and not any(re.match(r"\*\w", it) for it in shown[:first]):
        shown.insert(first, "*")
    line = f"{name}({', '.join(shown)})"
    if len(line) > _WIDTH:
        line = f"{name}(\n" + "".join(f"    {it},\n" for it in shown) + ")"
    return textwrap.indent(line, "    ")


def _is_given(value: Any) -> bool:
    """Return whether an application receives or implements it, and never calls it."""
    return getattr(value, "__name__", "") in _GIVEN


def _members(value: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class documents."""
    if issubclass(value, BaseException):
        return
    for name, member in vars(value).items():
        if not name.startswith("_") and inspect.getdoc(member):
            function = getattr(member, "__func__", member)
            if isinstance(member, property) or inspect.isfunction(function):
                yield name, member


def _parameters(value: Any) -> list[Parameter]:
    if inspect.isroutine(value):
        return _of_function(inspect.unwrap(value))
    if not inspect.isclass(value):
        return []
    if _is_given(value):
        return []
    if inspect.isfunction(value.__init__) and not _has_generated_init(value):
        return _of_function(value.__init__)
    return [it for each in reversed(_dataclasses(value)) for it in _of_fields(each)]


def _has_generated_init(value: type) -> bool:
    return is_dataclass(value) and "__init__" not in inspect.getsource(value)


def _of_function(function: Any) -> list[Parameter]:
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, _Function)
    actual = inspect.signature(function).parameters
    found = node.args
    plain = [*found.posonlyargs, *found.args]
    given = [None] * (len(plain) - len(found.defaults)) + found.defaults
    named = [*zip(plain, given, strict=True)]
    parameters = [_parameter(it, default, actual) for it, default in named]
    if found.vararg:
        parameters.append(_parameter(found.vararg, None, actual, "*"))
    for it, default in zip(found.kwonlyargs, found.kw_defaults, strict=True):
        parameter = _parameter(it, default, actual)
        parameters.append(replace(parameter, keyword_only=True))
    if found.kwarg:
        parameters.append(_parameter(found.kwarg, None, actual, "**"))
    return [it for it in parameters if it.name not in {"self", "cls"}]


def _parameter(
    it: ast.arg,
    default: ast.expr | None,
    actual: Mapping[str, inspect.Parameter],
    stars: str = "",
) -> Parameter:
    kind = ast.unparse(it.annotation).strip("'") if it.annotation else ""
    kind = re.sub(r"^Unpack\[_*(\w+)\]$", r"\1", kind)
    shown = "" if default is None else ast.unparse(default)
    if shown.startswith("_"):
        shown = re.sub(r"datetime\.", "", repr(actual[it.arg].default))
    return Parameter(f"{stars}{it.arg}", kind, shown)


def _of_fields(value: type) -> Iterator[Parameter]:
    """Yield the fields that a dataclass adds, as parameters."""
    node = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    assert isinstance(node, ast.ClassDef)
    keywords = ast.unparse(node.decorator_list[0])
    for it in node.body:
        if isinstance(it, ast.AnnAssign) and isinstance(it.target, ast.Name):
            default = ast.unparse(it.value) if it.value else ""
            default = re.sub(r"^field\(default_factory=(\w+)\)$", r"\1()", default)
            kind = ast.unparse(it.annotation)
            yield Parameter(it.target.id, kind, default, "kw_only=True" in keywords)


def _split(doc: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and its sections."""
    sections: dict[str, str] = {}
    text: list[str] = []
    name = None
    for line in doc.splitlines():
        if found := _SECTION.match(line):
            name = found[1]
            sections[name] = ""
        elif name is not None and (line.startswith("    ") or not line):
            sections[name] += f"{line}\n"
        else:
            name = None
            text.append(line)
    return "\n".join(text).strip(), sections


def _entries(section: str) -> dict[str, str]:
    found = _ENTRY.findall(section)
    return {name: " ".join(meaning.split()) for name, meaning in found}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
