"""A private substitute for Amazon SQS and SNS in tests: moto's server.

It keeps everything in memory: queues and messages are lost when it stops.
`docs/brokers/sqs.md` lists how it differs from AWS.
"""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from typing_extensions import override

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.lifetime import private_directory
from tests.servers.process import PrivateServer

__all__ = ["SqsServer", "sqs_server"]

PROGRAM = Path(__file__).with_name("program.py")

HEADERS = {
    "X-Amz-Target": "AmazonSQS.ListQueues",
    "Content-Type": "application/x-amz-json-1.0",
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/eu-west-1/sqs/"
    "aws4_request, SignedHeaders=host, Signature=0",
}


class SqsServer(PrivateServer):
    """One server process with its directory and port."""

    @property
    def endpoint_url(self) -> str:
        """The URL of the endpoint, the same after each start."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, scheme: str = "sqs", *, endpoint_url: str | None = None) -> str:
        """Return the broker URL, with another endpoint, such as a proxy, if given."""
        return (
            f"{scheme}://key:secret@eu-west-1/"
            f"?endpoint_url={endpoint_url or self.endpoint_url}"
        )

    @override
    def command(self) -> Sequence[str]:
        return [sys.executable, "-I", str(PROGRAM), "-p", str(self.port)]

    @override
    def answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            # moto loads a service at the first request to it.
            connection.request("POST", "/", "{}", HEADERS)
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def sqs_server() -> Iterator[SqsServer]:
    """Yield a running server; remove it after the block, or when this process ends."""
    if importlib.util.find_spec("moto") is None:
        raise ConfigError("moto is not installed; pip install 'moto[server]'")
    with (
        private_directory("pillarbox-sqs-") as directory,
        SqsServer(directory).running() as server,
    ):
        yield server
