"""The private parts of nats-py that pillarbox uses are unchanged."""

import inspect
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import requires, version
from pathlib import Path
from re import findall

import pytest
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.protocol.parser import Parser

from outbox.brokers.nats import client

METHODS: dict[Callable[..., object], str] = {
    Client._process_info: "ecca7bb931308fff",
    Client._process_headers: "fe656f61147df989",
    Client._parse_header_lines: "049cf69148e0bb4f",
    Client._build_message: "13cbe7b7f8cbe0fb",
    Client._send_command: "ed57e8e86389cf94",
    Client._flush_pending: "317c8d7ef54b90b7",
    Client._close: "9a92d3aca1b2c1fd",
    Parser.parse: "7d6165f1766cccd1",
    TcpTransport.write: "70127868971b6023",
}
ATTRIBUTES = {"_ps", "_transport", "_io_writer", "_pending", "_pending_data_size"}


def fingerprint(method: Callable[..., object]) -> str:
    return sha256(inspect.getsource(method).encode()).hexdigest()[:16]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_each_overridden_private_method_is_unchanged(
    method: Callable[..., object],
) -> None:
    assert fingerprint(method) == METHODS[method], (
        "nats-py changed it: read the new one, see whether our client is still right, "
        "run tests/brokers/nats, and note its fingerprint here"
    )


def test_the_minor_version_of_nats_py_is_pinned() -> None:
    assert "nats-py<2.17,>=2.16" in " ".join(requires("pillarbox") or [])
    assert version("nats-py").startswith("2.16.")


def test_every_private_name_in_use_is_listed() -> None:
    code = Path(client.__file__).read_text()
    used = set(findall(r"(?:def |\.|\")(_[a-z][a-z_]*)", code.partition('"""\n\n')[2]))
    ours = {"_held", "_secure"}
    overridden = {method.__name__ for method in METHODS}
    assert used - ours - {"_sid", "_client"} <= overridden | ATTRIBUTES | {"_error_cb"}
    assert all(
        f"`{name}`" in (client.__doc__ or "")
        for name in used - ours - {"_sid", "_client"}
    )


def test_a_client_has_the_private_attributes_that_are_set() -> None:
    known = vars(Client()).keys() | vars(TcpTransport()).keys()  # type: ignore[no-untyped-call]
    assert known >= ATTRIBUTES
