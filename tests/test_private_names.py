"""Each private name of a library that the product uses has a test that guards it."""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from redis.asyncio import Redis
from sqlalchemy import Column, Connection, Integer, MetaData, Table, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.sql import Insert
from typing_extensions import override

ROOT = Path(__file__).parent.parent
PRODUCT = ("outbox", "inbox", "relay", "migrations", "pillarbox")
# Public and documented, in spite of their names.
STANDARD = {"_asdict", "_current_frames", "_exit", "_replace"}
HERE = "tests/test_private_names.py"
GUARDS = {
    "outbox/brokers/nats/client.py": "tests/brokers/nats/test_nats_client.py",
    "outbox/brokers/rabbitmq/amqp.py": "tests/brokers/rabbitmq/"
    "test_rabbitmq_private_names.py",
    "outbox/schema.py": HERE,
    "inbox/handlers/attempt.py": HERE,
    "inbox/handlers/sessions.py": HERE,
    "inbox/sources/kafka/reader.py": HERE,
    "inbox/sources/redis/streams.py": HERE,
    "inbox/testing/drain.py": HERE,
    "inbox/transaction.py": HERE,
    "relay/publishers/kafka/producer.py": HERE,
    "relay/publishers/kafka/publisher.py": HERE,
}


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__")


def is_foreign(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in PRODUCT and top not in sys.stdlib_module_names


@cache
def modules() -> dict[str, ast.Module]:
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for folder in PRODUCT
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


@cache
def own_names() -> frozenset[str]:
    """The names that the product itself gives to something."""
    return frozenset(n for tree in modules().values() for n in defined(tree))


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                texts = (n for n in ast.walk(value) if isinstance(n, ast.Constant))
                yield from (str(text.value) for text in texts)


def names_in(tree: ast.Module) -> Iterator[str]:
    """The private names that a module takes from a library."""
    imported: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), level=0) if is_foreign(module):
                imported |= {a.asname or a.name: (module, a.name) for a in node.names}
                yield from (p for p in module.split(".") if is_private(p))
                yield from (a.name for a in node.names if is_private(a.name))
            case ast.Attribute(attr=name, ctx=ast.Load()) if is_private(name):
                if name not in own_names() and name not in STANDARD:
                    yield name
            case ast.Call(func=ast.Name(id="getattr" | "setattr"), args=[_, key, *_]):
                yield from foreign_text(key)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=key):
                yield from foreign_text(key)
            case ast.keyword(arg=str(name)) if is_private(name):
                yield name
            case ast.ClassDef():
                used = {n for n in (*defined(node), *read(node)) if is_private(n)}
                for base in node.bases if used else ():
                    if isinstance(base, ast.Name) and base.id in imported:
                        yield from used & names_of(*imported[base.id])


def foreign_text(key: ast.expr) -> Iterator[str]:
    match key:
        case ast.Constant(value=str(name)) if is_private(name):
            if name not in own_names():
                yield name


def read(tree: ast.AST) -> Iterator[str]:
    return (node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))


@cache
def names_of(module: str, name: str) -> frozenset[str]:
    """The names that a class of a library gives to something."""
    found: set[str] = set()
    for each in getattr(import_module(module), name).__mro__:
        found |= vars(each).keys()
        with suppress(OSError, TypeError):  # it is compiled
            found |= set(defined(ast.parse(textwrap.dedent(inspect.getsource(each)))))
    return frozenset(found)


def test_each_private_name_of_a_library_is_named_in_the_test_that_guards_it() -> None:
    uses = {(path, name) for path, tree in modules().items() for name in names_in(tree)}
    guards = {path: (ROOT / guard).read_text() for path, guard in GUARDS.items()}
    unguarded = sorted((p, name) for p, name in uses if name not in guards.get(p, ""))
    assert not unguarded, "use public names, or write a guard and name it in GUARDS"
    assert {path for path, _ in uses} == set(GUARDS)


@pytest.mark.parametrize(
    "name",
    [
        "_ALL_BROKERS_DOWN",
        "_AUTHENTICATION",
        "_DESTROY",
        "_FATAL",
        "_GAPLESS_GUARANTEE",
        "_PURGE_INFLIGHT",
        "_PURGE_QUEUE",
        "_UNKNOWN_PARTITION",
        "_UNKNOWN_TOPIC",
    ],
)
def test_confluent_kafka_has_the_errors_of_its_client_by_name(name: str) -> None:
    code = getattr(KafkaError, name)
    assert code < 0, f"confluent_kafka changed {name}: it is the client's own error"
    assert KafkaError(code).name() == name


def test_redis_filters_keys_by_their_type() -> None:
    assert "_type" in inspect.signature(Redis.scan_iter).parameters, (
        "redis-py renamed _type of scan_iter: correct inbox/sources/redis/streams.py"
    )


def test_sqlalchemy_says_how_far_a_pool_may_overflow() -> None:
    engine = create_engine("postgresql+psycopg://", pool_size=3, max_overflow=4)
    assert getattr(engine.pool, "_max_overflow", None) == 4, (
        "SQLAlchemy renamed QueuePool._max_overflow: correct inbox/handlers/sessions.py"
    )


def test_sqlalchemy_lists_the_connections_of_a_sessions_transaction() -> None:
    with Session(create_engine("sqlite://")) as session:
        connection = session.connection()
        listed = vars(session.get_transaction()).get("_connections", {})
        assert [first for first, *_ in listed.values()].count(connection) >= 1, (
            "SQLAlchemy changed SessionTransaction._connections: correct "
            "inbox/transaction.py and inbox/handlers/attempt.py"
        )
        (row,) = connection.execute(text("SELECT 1 AS number"))
        assert dict(row._mapping) == {"number": 1}


def test_sqlalchemy_lets_a_statement_execute_itself() -> None:
    seen: list[object] = []

    class Spy(Insert):
        inherit_cache = True

        @override
        def _execute_on_connection(
            self, connection: Connection, distilled_params: Any, execution_options: Any
        ) -> Any:
            seen.append((connection, distilled_params))
            return super()._execute_on_connection(
                connection, distilled_params, execution_options
            )

    table = Table("t", MetaData(), Column("number", Integer))
    with create_engine("sqlite://").connect() as connection:
        table.create(connection)
        connection.execute(Spy(table), [{"number": 1}, {"number": 2}])
    assert seen == [(connection, [{"number": 1}, {"number": 2}])], (
        "SQLAlchemy changed _execute_on_connection: correct outbox/schema.py"
    )
