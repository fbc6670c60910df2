"""Begin the demo's Redis stream anew: that of an earlier run holds other orders."""

from redis import Redis

from examples.shop.orders import TOPIC


def begin_anew(url: str) -> None:
    """Delete the stream of the demo's topic."""
    with Redis.from_url(url) as client:
        client.delete(TOPIC)
