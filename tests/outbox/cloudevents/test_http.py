"""Messages are converted to HTTP requests and back."""

import json

import pytest

from pillarbox import Message
from pillarbox.outbox.cloudevents.http import from_request, to_request
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.testing.samples import TEXTS, differences, full_message


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


def test_a_header_of_the_message_is_not_one_of_the_request() -> None:
    for name in ("Host", "content-length", "Authorization"):
        headers, arrived = round_trip(Message("t", b"", headers={name: "mine"}))
        assert name.lower() not in {sent.lower() for sent in headers}
        assert dict(arrived.headers) == {name: "mine"}


def test_a_reserved_name_is_neither_sent_nor_accepted() -> None:
    """Any client can send such a header."""
    for name in ("ce-tenant", "CE-Key", "cloudEvents:tenant", "pillarbox-topic"):
        with pytest.raises(InvalidMessageError, match="is a reserved name"):
            to_request(Message("t", b"", headers={name: "mine"}))
        sent = {"pillarbox-headers": json.dumps({name: "forged"})}
        with pytest.raises(InvalidMessageError, match="is a reserved name"):
            from_request(to_request(Message("t", b"")) | sent, b"")


def test_own_headers_that_are_not_a_json_object_of_texts_are_refused() -> None:
    for text in ("x-own", "[]", '{"x": 1}', r'{"x": "\ud800"}'):
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


def test_a_trace_context_is_continued_or_arrives_unchanged() -> None:
    headers = to_request(Message("t", b"")) | {"traceparent": "00-1-2-01"}
    assert from_request(headers, b"").headers == {"traceparent": "00-1-2-01"}

    message = Message("t", b"", headers={"traceparent": "00-1-2-01", "baggage": "a=ä"})
    headers, arrived = round_trip(message)
    assert headers["traceparent"] == "00-1-2-01"
    assert "baggage" not in headers
    assert dict(arrived.headers) == dict(message.headers)


def test_an_attribute_can_be_a_quoted_string_and_must_be_utf8() -> None:
    headers = to_request(Message("t", b"")) | {"ce-partitionkey": r'"a\"b%20c"'}
    assert from_request(headers, b"").key == 'a"b c'
    with pytest.raises(InvalidMessageError, match="isn't percent-encoded UTF-8"):
        from_request(headers | {"ce-partitionkey": "%FF"}, b"")


def test_a_content_type_that_http_cannot_carry_is_refused() -> None:
    for content_type in ("a/b\r\nx: y", "ä/b", " a/b"):
        with pytest.raises(InvalidMessageError, match="isn't printable ASCII"):
            to_request(Message("t", b"", content_type=content_type))
