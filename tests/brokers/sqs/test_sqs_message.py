"""The format of messages in SQS and SNS, and reading them back."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pillarbox import Message
from pillarbox.outbox.brokers.sqs.connection import SqsSettings, resource_name
from pillarbox.outbox.brokers.sqs.message import group_of, read, typed, write
from pillarbox.outbox.errors import InvalidMessageError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.testing.samples import TRACEPARENT, differences

TAKEN = re.compile("[\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]+")
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
messages = st.builds(
    Message,
    st.from_regex(r"[a-z.]{1,20}", fullmatch=True),
    st.binary() | st.text(st.characters(exclude_categories=["Cs"])).map(str.encode),
    key=st.none() | texts,
    tenant=st.none() | texts,
    headers=st.dictionaries(texts | st.just("traceparent"), texts | st.just("")),
    content_type=texts,
    schema_version=st.integers(1, 2**31 - 1),
    priority=st.sampled_from(Priority),
)


def through(message: Message) -> Message:
    written = write(message)
    arrived, problem = read(written.body, typed(written.attributes), place="q")
    assert problem is None
    return arrived


@given(messages)
def test_messages_round_trip_in_a_form_that_aws_accepts(message: Message) -> None:
    written = write(message)
    assert differences(message, through(message)) == {}
    assert len(written.attributes) <= 10
    for text in (written.body, *written.attributes.values()):
        assert TAKEN.fullmatch(text)
    assert re.fullmatch("[!-~]{1,128}", group_of(message))
    parts = [written.body]
    for name, value in written.attributes.items():
        parts += [name, "String", value]
    assert written.size == len("".join(parts).encode())


@given(messages)
def test_an_sns_envelope_is_read_like_the_message_itself(message: Message) -> None:
    written = write(message)
    envelope = {
        "Type": "Notification",
        "TopicArn": "arn:aws:sns:eu-west-1:123456789012:t",
        "Message": written.body,
        "MessageAttributes": {
            name: {"Type": "String", "Value": value}
            for name, value in written.attributes.items()
        },
    }
    arrived, problem = read(json.dumps(envelope), {}, place="q")
    assert problem is None
    assert differences(message, arrived) == {}


def test_text_stays_readable_and_the_trace_is_an_attribute_of_its_own() -> None:
    headers = {"traceparent": TRACEPARENT, "x": "ü"}
    written = write(Message("t", {"a": "ü"}, key="k", headers=headers))
    assert written.body == '{"a":"ü"}'
    assert written.attributes["traceparent"] == TRACEPARENT
    assert json.loads(written.attributes["headers"]) == {"x": "ü"}
    assert "body-encoding" not in written.attributes


def test_the_time_and_the_trace_attribute_give_way_to_other_attributes() -> None:
    headers = {"traceparent": TRACEPARENT, "x": "1"}
    full = Message("t", b"\xff", key="k", tenant="a", headers=headers)
    written = write(full)
    assert len(written.attributes) == 10
    assert json.loads(written.attributes["headers"]) == headers
    assert "ce-time" not in written.attributes

    urgent = full.replace(priority=Priority.REALTIME)
    written = write(urgent)
    assert len(written.attributes) == 10
    assert differences(urgent, through(urgent)) == {}
    alone = write(urgent.replace(headers={}))
    assert alone.attributes["ce-priority"] == "realtime"


def test_an_empty_value_is_refused() -> None:
    with pytest.raises(InvalidMessageError, match="is empty"):
        write(Message("t", b"1", key=""))


@pytest.mark.parametrize(
    ("body", "attributes", "problem"),
    [
        ("hello", {}, "there is no header ce-id"),
        ('{"Type": "Notification"}', {}, "ce-id"),
        ("[1]", {"headers": "[]"}, "isn't a JSON object of strings"),
        ("?", {"body-encoding": "base64"}, "isn't 'base64'"),
        ("?", {"body-encoding": "rot13"}, "isn't 'rot13'"),
    ],
)
def test_a_foreign_message_is_kept_with_its_problem(
    body: str, attributes: dict[str, Any], problem: str
) -> None:
    foreign, said = read(body, typed(attributes), place="orders")
    assert said is not None
    assert "message in orders" in said
    assert problem in said or "is missing" in said
    assert (foreign.topic, foreign.payload) == ("orders", body.encode())
    assert foreign.headers == attributes


def test_a_key_that_is_not_a_valid_group_is_hashed() -> None:
    assert group_of(Message("t", b"", key="order-1")) == "order-1"
    hashed = {group_of(Message("t", b"", key=k)) for k in ("a b", "a  b", "x" * 129)}
    assert len(hashed) == 3
    assert all(re.fullmatch("sha256-[0-9a-f]{64}", group) for group in hashed)
    alone = Message("t", b"")
    assert group_of(alone) == str(alone.id)


def test_separators_in_topics_become_hyphens() -> None:
    assert resource_name("orders.placed/v1:x", fifo=False) == "orders-placed-v1-x"
    assert resource_name("orders.placed", fifo=True) == "orders-placed.fifo"
    for bad in ("with space", "ünicode", "", "x" * 76):
        with pytest.raises(ValueError):
            resource_name(bad, fifo=True)


def test_a_secret_is_decoded_and_never_shown() -> None:
    settings = SqsSettings.from_url("sqs://key:se%2Fcret@eu-west-1/")
    assert settings.connection["aws_secret_access_key"] == "se/cret"
    assert "cret" not in repr(settings) + str(settings.unavailable(OSError("x")))


def test_an_answer_that_cannot_be_read_is_named_on_one_line() -> None:
    settings = SqsSettings.from_url("sqs://eu-west-1/")
    refusal = settings.unavailable(LookupError("no such\nthing"))
    assert str(refusal).endswith("sent an answer that can't be read: no such thing")
