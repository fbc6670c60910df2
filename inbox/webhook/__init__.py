"""Receive webhooks: verify each request, handle it once, and answer after the commit.

`WebhookApp` is an endpoint for any ASGI server; to write your own endpoint, use
`Verifier`.
"""

from inbox.webhook.app import WebhookApp
from inbox.webhook.events import WebhookFailed, WebhookRefused
from inbox.webhook.verifier import InvalidSignatureError, Verifier

__all__ = [
    "InvalidSignatureError",
    "Verifier",
    "WebhookApp",
    "WebhookFailed",
    "WebhookRefused",
]
