"""Other libraries read our messages correctly, and we read theirs.

The libraries are the CloudEvents SDK and the Standard Webhooks library.
"""

import base64
import json
import os
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest
from cloudevents.core.bindings import amqp, http, kafka
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from pika import BasicProperties
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from pillarbox import Message, uuid7
from pillarbox.inbox.webhook import InvalidSignatureError, Verifier
from pillarbox.outbox.brokers.kafka.connection import PREFIX as KAFKA
from pillarbox.outbox.brokers.rabbitmq.message import from_delivery, to_properties
from pillarbox.outbox.cloudevents.headers import from_headers, to_headers
from pillarbox.outbox.cloudevents.http import from_request, to_request
from pillarbox.outbox.cloudevents.signature import Secret
from pillarbox.outbox.message_id import moment_of
from pillarbox.outbox.testing.samples import TEXTS

JSON = JSONFormat()
FULL = Message(
    "orders.placed/eu:1",
    {"order": 1},
    key="Euro € 😀 100%",
    tenant="ä",
    headers={"x-own": "1"},
    schema_version=7,
)
BARE = Message("t", {"n": None})
ATTRIBUTES = {
    "id": str(uuid7()),
    "source": "/theirs",
    "type": "orders.placed",
    "specversion": "1.0",
    "datacontenttype": "application/json",
    "time": datetime(2026, 11, 22, 12, 0, tzinfo=UTC),
    "partitionkey": 'Euro € 😀 "100%"',
    "tenant": "acme",
    "schemaversion": "3",
    "subject": "an attribute that we do not know",
}


def check_sdk_event(event: object, message: Message) -> None:
    """Compare an event read by the SDK with the message that we wrote."""
    assert isinstance(event, CloudEvent)
    attributes = event.get_attributes()
    expected = {
        "specversion": "1.0",
        "id": str(message.id),
        "source": "urn:pillarbox",
        "type": message.topic,
        "time": moment_of(message.id),
        "datacontenttype": message.content_type,
        "schemaversion": str(message.schema_version),
        "partitionkey": message.key,
        "tenant": message.tenant,
    }
    assert attributes == {n: v for n, v in expected.items() if v is not None}
    assert event.get_data() == message.json()


def check_our_message(message: Message) -> None:
    """Compare a message that we read with the event that the SDK wrote."""
    assert str(message.id) == ATTRIBUTES["id"]
    assert message.topic == ATTRIBUTES["type"]
    assert message.key == ATTRIBUTES["partitionkey"]
    assert message.tenant == ATTRIBUTES["tenant"]
    assert message.schema_version == 3
    assert message.content_type == "application/json"
    assert message.json() == {"order": 1}


@pytest.fixture
def sdk_event() -> CloudEvent:
    return CloudEvent(dict(ATTRIBUTES), {"order": 1})


def read_as_request(message: Message) -> object:
    return http.from_http(http.HTTPMessage(to_request(message), message.payload), JSON)


def read_as_record(message: Message) -> object:
    headers = {n: v.encode() for n, v in to_headers(message, KAFKA).items()}
    key = None if message.key is None else message.key.encode()
    return kafka.from_binary(kafka.KafkaMessage(headers, key, message.payload), JSON)


def read_as_amqp(message: Message) -> object:
    properties = to_properties(message)
    assert properties.headers is not None
    delivered = amqp.AMQPMessage(
        {"content-type": properties.content_type},
        dict(properties.headers),
        message.payload,
    )
    return amqp.from_binary(delivered, JSON)


@pytest.mark.parametrize("read", [read_as_request, read_as_record, read_as_amqp])
def test_the_sdk_reads_our_messages(read: Callable[[Message], object]) -> None:
    for message in (FULL, BARE):
        check_sdk_event(read(message), message)


@pytest.mark.parametrize("text", TEXTS)
def test_the_sdk_reads_any_text_in_our_requests(text: str) -> None:
    message = Message("t", {}, key=text, tenant=text)
    check_sdk_event(read_as_request(message), message)


def test_we_read_the_requests_and_records_of_the_sdk(sdk_event: CloudEvent) -> None:
    request = http.to_binary(sdk_event, JSON)
    headers = {name.lower(): value for name, value in request.headers.items()}
    message = from_request(headers, request.body)
    check_our_message(message)
    assert dict(message.headers) == {"ce-subject": ATTRIBUTES["subject"]}

    record = kafka.to_binary(sdk_event, JSON)
    headers = {name: value.decode() for name, value in record.headers.items()}
    message = from_headers(headers, record.value, KAFKA)
    check_our_message(message)
    assert dict(message.headers) == {"ce_subject": ATTRIBUTES["subject"]}


@pytest.mark.parametrize("prefix", ["cloudEvents_", "cloudEvents:"])
def test_we_read_the_amqp_messages_of_the_sdk(
    sdk_event: CloudEvent, prefix: str
) -> None:
    written = amqp.to_binary(sdk_event, JSON)
    assert "cloudEvents_id" in written.application_properties
    message = read_amqp(
        {
            name.replace("cloudEvents_", prefix): value
            for name, value in written.application_properties.items()
        },
        written.application_data,
    )
    check_our_message(message)
    assert dict(message.headers) == {f"{prefix}subject": ATTRIBUTES["subject"]}


@pytest.mark.parametrize(
    ("prefix", "other"),
    [("cloudEvents_", "cloudEvents:"), ("cloudEvents:", "cloudEvents_")],
)
def test_a_header_under_the_other_amqp_prefix_is_no_attribute(
    prefix: str, other: str
) -> None:
    """The header neither adds an attribute to the event nor replaces one."""
    attributes = {"specversion": "1.0", "id": str(uuid7()), "type": "t"}
    forged = {"tenant": "mallory", "partitionkey": "k", "schemaversion": "9"}
    forged["type"] = "admin"
    message = read_amqp(
        {f"{prefix}{name}": value for name, value in attributes.items()}
        | {f"{other}{name}": value for name, value in forged.items()},
        b"{}",
    )
    assert (message.topic, message.tenant, message.key) == ("t", None, None)
    assert message.schema_version == 1
    assert dict(message.headers) == {f"{other}{n}": v for n, v in forged.items()}


def test_our_own_id_takes_precedence_over_one_with_the_other_prefix() -> None:
    """Messages written by our relay are never read under the other prefix."""
    properties = to_properties(FULL)
    assert properties.headers is not None
    forged = {"cloudEvents_id": str(uuid7()), "cloudEvents_type": "admin"}
    message = read_amqp({**properties.headers, **forged}, FULL.payload)
    assert (message.id, message.topic) == (FULL.id, FULL.topic)


def read_amqp(headers: Mapping[str, object], payload: bytes) -> Message:
    properties = BasicProperties(  # type: ignore[no-untyped-call]
        content_type="application/json", headers=dict(headers)
    )
    message, problem = from_delivery(properties, "orders.placed", payload)
    assert problem is None
    return message


def test_no_cloudevents_reader_mistakes_a_custom_header_for_an_attribute() -> None:
    """The SDK reads a header with a similar name, which `add` accepts, as a header."""
    for header in ("ce_tenant", "CE_TENANT", "ce-tenant", "cloudEvents:tenant"):
        message = Message("t", {}, headers={f"x-{header}": "forged"})
        for read in (read_as_request, read_as_record):
            check_sdk_event(read(message), message)


def new_secret() -> str:
    return "whsec_" + base64.b64encode(os.urandom(32)).decode()


def test_the_standardwebhooks_library_verifies_our_signatures() -> None:
    secret, moment = new_secret(), int(time.time())
    headers = {
        "webhook-id": str(FULL.id),
        "webhook-timestamp": str(moment),
        "webhook-signature": Secret(secret).sign(str(FULL.id), moment, FULL.payload),
    }
    assert Webhook(secret).verify(FULL.payload, headers) == {"order": 1}
    with pytest.raises(WebhookVerificationError):
        Webhook(new_secret()).verify(FULL.payload, headers)


def test_we_verify_the_standardwebhooks_librarys_signatures() -> None:
    secret, moment = new_secret(), datetime.now(UTC)
    body = json.dumps({"order": "ä"})
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(int(moment.timestamp())),
        "webhook-signature": Webhook(secret).sign("msg_1", moment, body),
    }
    assert Verifier([secret]).verify(headers, body.encode()) == "msg_1"
    with pytest.raises(InvalidSignatureError):
        Verifier([new_secret()]).verify(headers, body.encode())
