"""Web hooks, received: verified, handled once, and answered after the commit.

`webhook_app` is an endpoint for any ASGI server; `Verifier` is for an endpoint of
your own.
"""

from inbox.webhook.app import WebhookApp, webhook_app
from inbox.webhook.events import WebhookFailed, WebhookRefused
from inbox.webhook.verifier import InvalidSignatureError, Verifier

__all__ = [
    "InvalidSignatureError",
    "Verifier",
    "WebhookApp",
    "WebhookFailed",
    "WebhookRefused",
    "webhook_app",
]
