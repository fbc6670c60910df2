"""What NATS sends, read so that nothing stops it in silence."""

from nats.errors import Error as NatsError
from nats.errors import ProtocolError
from nats.protocol.parser import Parser
from typing_extensions import override

__all__ = ["LoudParser"]


class LoudParser(Parser):
    """Ends the connection where nats-py would write a log and read no more."""

    @override
    async def parse(self, data: bytes = b"") -> None:
        try:
            await super().parse(data)
        except (NatsError, OSError):
            raise
        except Exception as error:
            await self.nc._error_cb(error)
            raise ProtocolError from error
