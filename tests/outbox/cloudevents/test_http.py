"""Messages are converted to HTTP requests and back."""

import json

import pytest

from outbox.cloudevents.http import from_request, to_request
from outbox.errors import InvalidMessageError
from outbox.testing.samples import TEXTS, differences, full_message
from pillarbox import Message


def round_trip(message: Message) -> tuple[dict[str, str], Message]:
    headers = to_request(message)
    folded = {name.lower(): value for name, value in headers.items()}
    assert len(folded) == len(headers)
    for name, value in headers.items():
        assert name.isascii()
        assert not set(name) & set(' :\r\n"()/;<>=?@[]{}\\,')
        assert value.isascii()
        assert value.isprintable()
        assert value == value.strip()
    return headers, from_request(folded, message.payload)


def test_attributes_are_percent_encoded_as_the_http_binding_says() -> None:
    headers, _ = round_trip(Message("t", b"", key='Euro € 😀 "100%"'))
    encoded = "Euro%20%E2%82%AC%20%F0%9F%98%80%20%22100%25%22"
    assert headers["ce-partitionkey"] == encoded


def test_text_that_http_can_carry_is_unchanged() -> None:
    message = full_message("orders.placed/eu:1")
    headers, arrived = round_trip(message)
    assert headers["ce-type"] == "orders.placed/eu:1"
    assert headers["traceparent"] == message.headers["traceparent"]
    assert headers["tracestate"] == "a=1,b=2"
    assert headers["pillarbox-headers"] == '{"x-own": "1"}'
    assert differences(message, arrived) == {}


@pytest.mark.parametrize("text", [*TEXTS, " ", "%41", "a%20b", "a\tb", "\r\n", "*"])
def test_any_text_survives_as_a_key_header_value_or_header_name(text: str) -> None:
    message = Message("t", b"", key=f"k{text}", headers={f"n{text}": text, text: "1"})
    _, arrived = round_trip(message)
    assert differences(message, arrived) == {}


@pytest.mark.parametrize("name", ["Host", "content-length", "Authorization"])
def test_a_header_of_the_message_is_not_one_of_the_request(name: str) -> None:
    headers, arrived = round_trip(Message("t", b"", headers={name: "mine"}))
    assert name.lower() not in {sent.lower() for sent in headers}
    assert dict(arrived.headers) == {name: "mine"}


@pytest.mark.parametrize("name", ["ce-tenant", "Webhook-Id", "pillarbox-headers"])
def test_a_reserved_name_is_not_sent(name: str) -> None:
    with pytest.raises(InvalidMessageError, match="is a reserved name"):
        to_request(Message("t", b"", headers={name: "mine"}))


@pytest.mark.parametrize(
    "name", ["ce-tenant", "CE-Key", "cloudEvents:tenant", "pillarbox-topic"]
)
def test_a_reserved_name_that_arrives_is_refused(name: str) -> None:
    """Any client can send such a header."""
    headers = to_request(Message("t", b"")) | {
        "pillarbox-headers": json.dumps({name: "forged"})
    }
    with pytest.raises(InvalidMessageError, match="is a reserved name"):
        from_request(headers, b"")


@pytest.mark.parametrize("text", ["x-own", "[]", '{"x": 1}', r'{"x": "\ud800"}'])
def test_own_headers_that_are_not_a_json_object_of_texts_are_refused(text: str) -> None:
    headers = to_request(Message("t", b"")) | {"pillarbox-headers": text}
    with pytest.raises(InvalidMessageError, match="isn't a JSON object of strings"):
        from_request(headers, b"")


def test_the_headers_of_an_encoded_payload_are_sent() -> None:
    kept = {"pillarbox-codec": "c:1", "pillarbox-content-type": "a/b"}
    _, arrived = round_trip(Message("t", b"", headers=kept))
    assert dict(arrived.headers) == kept


def test_names_that_differ_only_in_case_stay_distinct() -> None:
    message = Message("t", b"", headers={"X-A": "1", "x-a": "2", " a": "3", " A": "4"})
    _, arrived = round_trip(message)
    assert differences(message, arrived) == {}


def test_headers_added_in_transit_are_not_headers_of_the_message() -> None:
    headers = to_request(Message("t", b"", headers={"x": "1"}))
    headers |= {
        "host": "h",
        "via": "proxy",
        "x-request-id": "7",
        "x-real-ip": "1.1.1.1",
        "authorization": "Bearer secret",
        "cookie": "session=secret",
    }
    assert from_request(headers, b"").headers == {"x": "1"}


def test_a_trace_context_started_by_a_proxy_is_continued() -> None:
    headers = to_request(Message("t", b"")) | {"traceparent": "00-1-2-01"}
    assert from_request(headers, b"").headers == {"traceparent": "00-1-2-01"}


def test_a_trace_context_that_is_no_header_arrives_unchanged() -> None:
    message = Message("t", b"", headers={"traceparent": "00-1-2-01", "baggage": "a=ä"})
    headers, arrived = round_trip(message)
    assert headers["traceparent"] == "00-1-2-01"
    assert "baggage" not in headers
    assert dict(arrived.headers) == dict(message.headers)


def test_an_attribute_can_be_a_quoted_string() -> None:
    headers = to_request(Message("t", b"")) | {"ce-partitionkey": r'"a\"b%20c"'}
    assert from_request(headers, b"").key == 'a"b c'


def test_invalid_utf8_is_reported() -> None:
    headers = to_request(Message("t", b"")) | {"ce-partitionkey": "%FF"}
    with pytest.raises(InvalidMessageError, match="isn't percent-encoded UTF-8"):
        from_request(headers, b"")


@pytest.mark.parametrize("content_type", ["a/b\r\nx: y", "ä/b", " a/b"])
def test_a_content_type_that_http_cannot_carry_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidMessageError, match="isn't printable ASCII"):
        to_request(Message("t", b"", content_type=content_type))
