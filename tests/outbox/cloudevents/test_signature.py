"""Webhooks are signed and verified, and the secrets never revealed."""

import time
from datetime import timedelta

import pytest

from pillarbox import Message
from pillarbox.inbox.webhook import InvalidSignatureError, Verifier
from pillarbox.outbox.cloudevents.http import to_request
from pillarbox.outbox.cloudevents.signature import Secret, read_secrets
from pillarbox.outbox.errors import ConfigError, InvalidMessageError

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OTHER = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD"
ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
BODY = b'{"test": 2432232314}'


def signed(
    *secrets: str, id: str = ID, body: bytes = BODY, age: float = 0
) -> dict[str, str]:
    moment = int(time.time() - age)
    signatures = [Secret(secret).sign(id, moment, body) for secret in secrets]
    return {
        "Webhook-Id": id,
        "Webhook-Timestamp": str(moment),
        "Webhook-Signature": " ".join(signatures),
    }


def test_the_signature_equals_the_published_example() -> None:
    signature = Secret(SECRET).sign(ID, 1614265330, BODY)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_request_signed_with_any_of_the_secrets_is_authentic() -> None:
    both = Verifier([OTHER, SECRET])
    assert both.verify(signed(SECRET), BODY) == ID
    assert both.verify(signed(OTHER), BODY) == ID
    assert Verifier([SECRET]).verify(signed(OTHER, SECRET), BODY) == ID
    for secret in (OTHER, "whsec_" + "A" * 32):
        with pytest.raises(
            InvalidSignatureError, match="no signature matches this body"
        ):
            Verifier([SECRET]).verify(signed(secret), BODY)


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("Webhook-Id", ["", "msg_other"]),
        (
            "Webhook-Timestamp",
            ["", "soon", "-5", "1" * 400, "٣", str(int(time.time()) - 60)],
        ),
        (
            "Webhook-Signature",
            ["", "v1,", "ü ,,, v2", "v1a,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="],
        ),
    ],
    ids=["id", "timestamp", "signature"],
)
def test_a_changed_request_is_refused(header: str, values: list[str]) -> None:
    for value in values:
        with pytest.raises(InvalidSignatureError):
            Verifier([SECRET]).verify(signed(SECRET) | {header: value}, BODY)
    with pytest.raises(InvalidSignatureError):
        Verifier([SECRET]).verify(signed(SECRET), BODY + b" ")


def test_a_request_with_an_old_or_future_timestamp_is_refused() -> None:
    patient = Verifier([SECRET], tolerance=timedelta(minutes=10))
    for age, said in ((400, "old"), (-400, "ahead")):
        request = signed(SECRET, age=age)
        with pytest.raises(InvalidSignatureError, match=said):
            Verifier([SECRET]).verify(request, BODY)
        assert patient.verify(request, BODY) == ID


def test_verifying_an_authentic_request_returns_its_message() -> None:
    message = Message("orders", b"1", key="a b", headers={"x": "1"})
    headers = to_request(message) | signed(SECRET, id=str(message.id), body=b"1")
    assert Verifier([SECRET]).read(headers, b"1") == message


def test_a_signature_is_not_valid_for_another_messages_id() -> None:
    message, other = Message("orders", b"1"), Message("orders", b"1")
    headers = to_request(other) | signed(SECRET, id=str(message.id), body=b"1")
    with pytest.raises(InvalidMessageError, match="ce-id differs from webhook-id"):
        Verifier([SECRET]).read(headers, b"1")


def test_an_invalid_secret_is_refused_and_none_is_shown() -> None:
    for text in (
        "",
        "whsec_",
        "whsec_!!!!",
        "whsec_c2hvcnQ=",
        "MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
        f"whsec_{'A' * 100}",
        "whsec_ü",
    ):
        with pytest.raises(ConfigError, match="webhook secret") as told:
            read_secrets(text)
        assert not text.removeprefix("whsec_") or text not in str(told.value)
    without: list[list[str] | str] = [[], "", [""]]
    for secrets in without:
        with pytest.raises(ConfigError, match="webhook secret"):
            Verifier(secrets)
    secret = Secret(SECRET)
    assert f"{secret} {secret!r}" == "Secret(…) Secret(…)"
