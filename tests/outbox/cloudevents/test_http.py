"""Messages are converted to HTTP requests and back."""

import pytest

from outbox.cloudevents.http import from_request, to_request
from outbox.errors import InvalidMessageError
from outbox.testing.samples import TEXTS, differences, full_message
from pillarbox import Message

CREDENTIALS = [
    *("Authorization", "Cookie", "Cookie2", "Set-Cookie", "Proxy-Authorization"),
    *("X-Api-Key", "Api-Key", "Apikey", "X_API_KEY", "Ocp-Apim-Subscription-Key"),
    *("X-Auth-Token", "X-Amz-Security-Token", "X-Ms-Token-Aad-Access-Token"),
    *("X-Auth-Request-Access-Token", "X-Csrf-Token", "X-XSRF-TOKEN", "X-CSRFToken"),
    *("Cf-Access-Jwt-Assertion", "X-Goog-Iap-Jwt-Assertion", "X-Amzn-Oidc-Data"),
    *("X-Client-Cert", "X-SSL-Client-Cert", "X-Client-Secret", "X-Session-Id"),
    *("X-Amz-Credential", "x.password"),
]
"""Headers by which clients and proxies prove who they are."""


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
    assert headers["pillarbox-headers"] == "traceparent, tracestate, x-own"
    assert differences(message, arrived) == {}


@pytest.mark.parametrize("text", [*TEXTS, " ", "%41", "a%20b", "a\tb", "\r\n", "*"])
def test_any_text_survives_as_a_key_header_value_or_header_name(text: str) -> None:
    message = Message("t", b"", key=f"k{text}", headers={f"n{text}": text, text: "1"})
    _, arrived = round_trip(message)
    assert differences(message, arrived) == {}


@pytest.mark.parametrize(
    "name",
    [
        "Host",
        "content-length",
        "Transfer-Encoding",
        "Idempotency-Key",
        "X-Forwarded-For",
        *CREDENTIALS,
    ],
)
def test_a_header_name_reserved_by_http_is_renamed(name: str) -> None:
    message = Message("t", b"", headers={name: "mine"})
    headers, arrived = round_trip(message)
    sent = {n.lower(): value for n, value in headers.items()}
    assert sent.get(name.lower()) != "mine"
    assert dict(arrived.headers) == {name: "mine"}


@pytest.mark.parametrize("name", ["ce-tenant", "Webhook-Id", "pillarbox-headers"])
def test_a_reserved_name_is_not_sent(name: str) -> None:
    with pytest.raises(InvalidMessageError, match="is a reserved name"):
        to_request(Message("t", b"", headers={name: "mine"}))


def fully_escaped(name: str) -> str:
    return "".join(f"%{byte:02X}" for byte in name.encode())


@pytest.mark.parametrize(
    "name",
    [
        *CREDENTIALS,
        *("authorization", "set-cookie", "Host"),
        *("proxy-authorization", "x-forwarded-for", "connection", "te", "webhook-id"),
        *("pillarbox-headers", "ce-tenant", "Ce-Tenant", "content-type"),
        # Names escaped in a way that our publisher doesn't use.
        *("x%2Down", "%63e-tenant", "%61uthorization", "a%"),
        *(
            fully_escaped("ce-tenant"),
            fully_escaped("CE-Key"),
            fully_escaped("cloudEvents:tenant"),
        ),
        *(
            fully_escaped("pillarbox-topic"),
            fully_escaped("content-type"),
            "cloudEvents%3Atenant",
        ),
    ],
)
def test_header_names_that_our_publisher_never_writes_are_refused(name: str) -> None:
    headers = to_request(Message("t", b"")) | {
        "pillarbox-headers": f"{name}*",
        "authorization": "Bearer secret",
        "cookie": "session=secret",
        name.lower(): "secret",
    }
    with pytest.raises(InvalidMessageError, match=r"headers .*: is "):
        from_request(headers, b"")


@pytest.mark.parametrize("name", ["author", "x-secretary", "causation-id", "x-key"])
def test_a_name_that_only_resembles_a_credential_is_sent_unchanged(name: str) -> None:
    headers, arrived = round_trip(Message("t", b"", headers={name: "mine"}))
    assert headers[name] == "mine"
    assert dict(arrived.headers) == {name: "mine"}


def test_a_listed_header_cannot_become_an_attribute() -> None:
    """Any client can send such a header, with a percent-encoded name."""
    headers = to_request(Message("t", b"")) | {
        "pillarbox-headers": fully_escaped("ce-tenant"),
        fully_escaped("ce-tenant").lower(): "forged",
    }
    with pytest.raises(InvalidMessageError, match="'ce-tenant': is a reserved name"):
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
    }
    assert from_request(headers, b"").headers == {"x": "1"}


def test_a_trace_context_started_by_a_proxy_is_continued() -> None:
    headers = to_request(Message("t", b"")) | {"traceparent": "00-1-2-01"}
    assert from_request(headers, b"").headers == {"traceparent": "00-1-2-01"}


def test_a_header_lost_in_transit_is_reported() -> None:
    headers = to_request(Message("t", b"", headers={"x_own": "1"}))
    del headers["x_own"]
    with pytest.raises(InvalidMessageError, match="'x_own': is listed in pillarbox"):
        from_request(headers, b"")


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
