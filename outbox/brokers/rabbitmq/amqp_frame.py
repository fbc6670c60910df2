"""Frames of AMQP as pika reads them, and properties that it can't read."""

import struct
from typing import Any, Final

from pika import BasicProperties, spec
from pika.exceptions import InvalidFrameError
from pika.frame import Header, decode_frame

_BODY_SIZE: Final = 4
_PROPERTIES: Final = 12


def read_frame(data: bytes) -> tuple[int, Any]:
    """Give the first frame, and how many bytes it has; 0 if some are missing.

    At tables that are nested too deep, or a timestamp in milliseconds, pika raises, and
    the connection ends, again with each redelivery. So properties that it can't read
    become one header without a name: their bytes.

    Raises:
        AMQPError: it is no frame of AMQP.
    """
    try:
        frame: tuple[int, Any] = decode_frame(data)
    except InvalidFrameError:
        raise
    except Exception:
        kind, channel, size = struct.unpack_from(">BHL", data)
        if kind != spec.FRAME_HEADER:
            raise
        content = data[spec.FRAME_HEADER_SIZE : spec.FRAME_HEADER_SIZE + size]
        (body_size,) = struct.unpack_from(">Q", content, _BODY_SIZE)
        properties = BasicProperties(  # type: ignore[no-untyped-call]
            headers={"": content[_PROPERTIES:]}
        )
        header = Header(channel, body_size, properties)
        return spec.FRAME_HEADER_SIZE + size + spec.FRAME_END_SIZE, header
    return frame
