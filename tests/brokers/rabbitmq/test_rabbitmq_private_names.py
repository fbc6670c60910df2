"""pika's private names that the client uses, and pika's code that it relies on."""

import ast
import inspect
import textwrap
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pika
import pika.adapters.asyncio_connection as pika_asyncio
import pytest
from pika.adapters.base_connection import BaseConnection
from pika.connection import Connection

ROOT: Final = Path(__file__).parents[3]
# Attributes that pika sets on its connection have no code of their own: the methods
# that set them stand for them.
CODE: Final[dict[str, dict[Any, str]]] = {
    "_AsyncioIOServicesAdapter": {
        pika_asyncio._AsyncioIOServicesAdapter.getaddrinfo: "5864ed34",
        pika_asyncio._AsyncioIOReference: "03a1c0fb",
    },
    "_adapter_disconnect_stream": {
        BaseConnection._adapter_disconnect_stream: "3435e68d",
    },
    "_adapter_emit_data": {
        BaseConnection._adapter_emit_data: "61aa1dd8",
        Connection._output_marshaled_frames: "8a0c2863",
    },
    "_frame_buffer": {Connection._on_data_available: "ec3a0c1f"},
    "_read_frame": {Connection._read_frame: "6154b8bd"},
    "_terminate_stream": {Connection._terminate_stream: "e58c3f6d"},
    "_transport": {
        BaseConnection._proto_connection_made: "9514435f",
        BaseConnection._proto_connection_lost: "66818bc0",
    },
}


def private_names(source: str) -> set[str]:
    """The names with an underscore that a module uses but doesn't define."""
    used, own = set[str](), set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if "pika" in module:
                used |= {alias.name for alias in names}
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                own.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()):
                own.add(name)
            case ast.FunctionDef(name=name, decorator_list=decorators):
                is_ours = "override" not in map(ast.unparse, decorators)
                (own if is_ours else used).add(name)
            case ast.AsyncFunctionDef(name=name):
                own.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case _:
                pass
    return {name for name in used - own if name[0] == "_" and name[:2] != "__"}


def digest_of(code: Any) -> str:
    """Identify code by what it does: not by its comments, docstrings and types."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                node.body = [
                    n
                    for n in node.body
                    if not (
                        isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
                    )
                ]
                if isinstance(node, ast.FunctionDef):
                    node.returns = None
            case ast.arg():
                node.annotation = None
            case _:
                pass
    return sha256(ast.unparse(tree).encode()).hexdigest()[:8]


def test_the_client_uses_no_private_name_but_these() -> None:
    used = {
        name
        for folder in ("outbox/brokers", "relay/publishers", "inbox/sources")
        for path in (ROOT / folder / "rabbitmq").glob("*.py")
        for name in private_names(path.read_text())
    }
    assert used == set(CODE)


@pytest.mark.parametrize("name", CODE)
def test_pikas_code_behind_a_private_name_is_as_it_was(name: str) -> None:
    for code, known in CODE[name].items():
        assert digest_of(code) == known, (
            f"pika {pika.__version__} changed {code.__qualname__}, on which "
            f"{name} in outbox/brokers/rabbitmq/amqp.py relies: read the difference, "
            "run tests/brokers/rabbitmq, then write the new digest here"
        )
