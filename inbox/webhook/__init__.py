"""Receive webhooks: verify each request, handle it once, and answer after the commit.

`WebhookApp` is an endpoint for any ASGI server; to write your own endpoint, use
`Verifier`.
"""

from pillarbox.inbox.webhook.app import WebhookApp
from pillarbox.inbox.webhook.events import WebhookFailed, WebhookRefused
from pillarbox.inbox.webhook.verifier import InvalidSignatureError, Verifier

__all__ = [
    "InvalidSignatureError",
    "Verifier",
    "WebhookApp",
    "WebhookFailed",
    "WebhookRefused",
]
