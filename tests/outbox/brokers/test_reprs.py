"""The repr of an object made from a URL shows no password."""

import pkgutil
from collections.abc import Callable
from dataclasses import is_dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import pillarbox
from pillarbox.outbox.brokers.http import HttpOptions
from pillarbox.outbox.brokers.nats.settings import NatsSettings
from pillarbox.outbox.brokers.sqs.connection import SqsSettings
from pillarbox.outbox.brokers.sqs.options import SqsOptions
from pillarbox.outbox.cloudevents.signature import Secret
from pillarbox.relay.publishers.http.settings import HttpSettings

SECRET = "5ecre7"
OWN = f"sentinel_password={SECRET}"
WEBHOOK = "whsec_" + "5ecre7" * 6
NOT_IMPORTED = (
    "pillarbox.inbox.demo.consumers",  # takes its URL from the environment
    "pillarbox.outbox.migrations",  # run by Alembic
    *(f"pillarbox.{package}.testing" for package in ("outbox", "relay", "inbox")),
)
TELLING = ("url", "password", "secret", "token", "credential", "connection", "dsn")
SETTINGS: dict[type[object], list[Callable[[], object]]] = {
    NatsSettings: [
        lambda: NatsSettings.from_url(f"nats://me:{SECRET}@host:4222"),
        lambda: NatsSettings.from_url(f"nats://{SECRET}@host:4222"),
    ],
    SqsSettings: [lambda: SqsSettings.from_url(f"sqs://key:{SECRET}@eu-west-1/")],
    HttpSettings: [
        lambda: HttpSettings(
            url=f"https://me:{SECRET}@host/path?token={SECRET}",
            secrets=(Secret(WEBHOOK),),
            options=HttpOptions(),
        )
    ],
    # These hold no secret: the name of a variable, and an address without a user.
    HttpOptions: [lambda: HttpOptions(secret_env="HOST_SECRET_ENV", ca_file="host")],
    SqsOptions: [lambda: SqsOptions(endpoint_url="https://host:1")],
}
URLS = {
    "amqp": f"amqp://me:{SECRET}@127.0.0.1/",
    "amqps": f"amqps://me:{SECRET}@127.0.0.1/",
    "rabbitmq": f"rabbitmq://me:{SECRET}@127.0.0.1/",
    "http": f"http://me:{SECRET}@127.0.0.1/?unsigned=true&allow_private=true",
    "https": f"https://me:{SECRET}@127.0.0.1/?unsigned=true&allow_private=true",
    "kafka": f"kafka://127.0.0.1/?sasl.username=me&sasl.password={SECRET}",
    "nats": f"nats://me:{SECRET}@127.0.0.1",
    "tls": f"tls://me:{SECRET}@127.0.0.1",
    "postgres": f"postgres://me:{SECRET}@127.0.0.1/x",
    "postgresql": f"postgresql://me:{SECRET}@127.0.0.1/x",
    "redis": f"redis://me:{SECRET}@127.0.0.1",
    "rediss": f"rediss://me:{SECRET}@127.0.0.1",
    "redis+sentinel": f"redis+sentinel://me:{SECRET}@127.0.0.1/main?{OWN}",
    "rediss+sentinel": f"rediss+sentinel://me:{SECRET}@127.0.0.1/main?{OWN}",
    "sns": f"sns://key:{SECRET}@eu-west-1/",
    "sqs": f"sqs://key:{SECRET}@eu-west-1/",
    "memory": "memory://",
}


def all_dataclasses() -> list[type[Any]]:
    found = set()
    for module in pkgutil.walk_packages(pillarbox.__path__, "pillarbox."):
        if not module.name.startswith(NOT_IMPORTED):
            found |= {
                kind
                for kind in vars(import_module(module.name)).values()
                if isinstance(kind, type)
                and (is_dataclass(kind) or hasattr(kind, "_fields"))
                and kind.__module__.startswith("pillarbox.")
            }
    return sorted(found, key=lambda kind: kind.__qualname__)


def holds_a_url(kind: type[Any]) -> bool:
    return hasattr(kind, "from_url") or any(
        word in name and "int" not in str(hint) and "Connection" not in str(hint)
        for name, hint in kind.__annotations__.items()
        for word in TELLING
    )


def test_settings_show_no_password() -> None:
    kinds = all_dataclasses()
    assert len(kinds) > 50
    assert {kind for kind in kinds if holds_a_url(kind)} == SETTINGS.keys()
    for kind, ways in SETTINGS.items():
        for make in ways:
            made = make()
            for said in (repr(made), str(made), f"{[made]}"):
                assert kind.__name__ in said
                assert "host" in said or "eu-west-1" in said, kind
                assert SECRET not in said, kind


async def test_publishers_and_sources_hide_passwords() -> None:
    for entry in entry_points(group="pillarbox.publishers"):
        publisher = entry.load()(URLS[entry.name])
        assert SECRET not in f"{publisher!r} {publisher}", entry.name
    for entry in entry_points(group="pillarbox.sources"):
        source = entry.load()(URLS[entry.name], consumer="c", topics=["t"])
        assert SECRET not in f"{source!r} {source}", entry.name
