"""A message as an HTTP request, and back."""

import pytest

from outbox import Message
from outbox.errors import InvalidMessageError
from outbox.http import from_request, to_request
from outbox.testing.samples import TEXTS, differences, full_message


def there_and_back(message: Message) -> tuple[dict[str, str], Message]:
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
    headers, _ = there_and_back(Message("t", b"", key='Euro € 😀 "100%"'))
    encoded = "Euro%20%E2%82%AC%20%F0%9F%98%80%20%22100%25%22"
    assert headers["ce-partitionkey"] == encoded


def test_what_http_can_say_is_left_as_it_is() -> None:
    message = full_message("orders.placed/eu:1")
    headers, arrived = there_and_back(message)
    assert headers["ce-type"] == "orders.placed/eu:1"
    assert headers["traceparent"] == message.headers["traceparent"]
    assert headers["tracestate"] == "a=1,b=2"
    assert headers["pillarbox-headers"] == "traceparent, tracestate, x-own"
    assert differences(message, arrived) == {}


@pytest.mark.parametrize("text", [*TEXTS, " ", "%41", "a%20b", "a\tb", "\r\n", "*"])
def test_any_text_survives_as_key_value_and_name(text: str) -> None:
    message = Message("t", b"", key=f"k{text}", headers={f"n{text}": text, text: "1"})
    _, arrived = there_and_back(message)
    assert differences(message, arrived) == {}


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "content-length",
        "Transfer-Encoding",
        "Authorization",
        "Cookie",
        "Webhook-Signature",
        "ce-id",
        "ce-source",
        "Idempotency-Key",
        "X-Forwarded-For",
        "pillarbox-headers",
        "Content-Type",
    ],
)
def test_a_name_that_http_has_for_itself_goes_under_another(name: str) -> None:
    message = Message("t", b"", headers={name: "mine"})
    headers, arrived = there_and_back(message)
    sent = {n.lower(): value for n, value in headers.items()}
    assert sent.get(name.lower()) != "mine"
    attributes = {"ce-id", "ce-source"}
    assert dict(arrived.headers) == ({} if name in attributes else {name: "mine"})


def test_names_that_differ_in_their_case_only_stay_two() -> None:
    message = Message("t", b"", headers={"X-A": "1", "x-a": "2", " a": "3", " A": "4"})
    _, arrived = there_and_back(message)
    assert differences(message, arrived) == {}


def test_headers_that_the_way_adds_are_not_the_messages() -> None:
    headers = to_request(Message("t", b"", headers={"x": "1"}))
    headers |= {
        "host": "h",
        "via": "proxy",
        "x-request-id": "7",
        "x-real-ip": "1.1.1.1",
    }
    assert from_request(headers, b"").headers == {"x": "1"}


def test_the_context_of_a_trace_that_a_proxy_began_is_taken_up() -> None:
    headers = to_request(Message("t", b"")) | {"traceparent": "00-1-2-01"}
    assert from_request(headers, b"").headers == {"traceparent": "00-1-2-01"}


def test_a_header_that_got_lost_on_the_way_is_told() -> None:
    headers = to_request(Message("t", b"", headers={"x_own": "1"}))
    del headers["x_own"]
    with pytest.raises(InvalidMessageError, match="'x_own': is listed in pillarbox"):
        from_request(headers, b"")


def test_an_attribute_may_be_a_quoted_string() -> None:
    headers = to_request(Message("t", b"")) | {"ce-partitionkey": r'"a\"b%20c"'}
    assert from_request(headers, b"").key == 'a"b c'


def test_what_is_no_utf8_is_told() -> None:
    headers = to_request(Message("t", b"")) | {"ce-partitionkey": "%FF"}
    with pytest.raises(InvalidMessageError, match="isn't percent-encoded UTF-8"):
        from_request(headers, b"")


@pytest.mark.parametrize("content_type", ["a/b\r\nx: y", "ä/b", " a/b"])
def test_a_content_type_that_http_can_not_say_is_refused(content_type: str) -> None:
    with pytest.raises(InvalidMessageError, match="isn't printable ASCII"):
        to_request(Message("t", b"", content_type=content_type))
