"""A private server that stands in for Amazon SQS and SNS: moto's, for tests.

It keeps everything in memory: queues and messages are gone when it stops. What it
doesn't do as AWS does stands in the broker's page.
"""

import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from outbox.errors import ConfigError, OutboxError
from outbox.testing.lifetime import free_port, private_directory, wait_until, watched

__all__ = ["SqsServer", "sqs_server"]

PROGRAM = Path(__file__).with_name("sqs_program.py")

HEADERS = {
    "X-Amz-Target": "AmazonSQS.ListQueues",
    "Content-Type": "application/x-amz-json-1.0",
    "Authorization": "AWS4-HMAC-SHA256 Credential=key/20260101/eu-west-1/sqs/"
    "aws4_request, SignedHeaders=host, Signature=0",
}


class SqsServer:
    """One server: its directory, its port and its life."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        """Where it is, the same after each start."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid_file(self) -> Path:
        """Where the process id of the running server stands."""
        return self._directory / "moto.pid"

    def url(self, scheme: str = "sqs", *, endpoint_url: str | None = None) -> str:
        """Give the broker URL, by another way to the server if there is one."""
        return (
            f"{scheme}://key:secret@eu-west-1/"
            f"?endpoint_url={endpoint_url or self.endpoint_url}"
        )

    def start(self) -> None:
        """Start, and return when it answers."""
        log = self._directory / "moto.log"
        with log.open("wb") as output:
            self._process = process = subprocess.Popen(
                [sys.executable, "-I", PROGRAM, "-p", str(self._port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd=self._directory,
            )
        self.pid_file.write_text(str(process.pid))
        wait_until(lambda: self._answers() or process.poll() is not None, seconds=30)
        if not self._answers() or process.poll() is not None:
            self.kill()
            report = log.read_text(errors="replace")
            raise OutboxError(f"moto's server doesn't answer: {report[-2000:]}")

    def stop(self) -> None:
        """Stop in order, and return when it is over."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """Stop as a crash does."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(timeout=60)
            self._process = None
        self.pid_file.unlink(missing_ok=True)

    def _answers(self) -> bool:
        connection = HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            # It loads a service with the first request to it.
            connection.request("POST", "/", "{}", HEADERS)
            return connection.getresponse().status == HTTPStatus.OK
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()


@contextmanager
def sqs_server() -> Iterator[SqsServer]:
    """Give a running server that is gone after the block, or with this process."""
    if importlib.util.find_spec("moto") is None:
        raise ConfigError("no moto here; install it: pip install 'moto[server]'")
    with private_directory("pillarbox-sqs-") as directory:
        server = SqsServer(directory)
        with watched(directory, server.pid_file, signal.SIGKILL):
            try:
                server.start()
                yield server
            finally:
                server.kill()
