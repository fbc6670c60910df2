"""Create clients of Amazon SQS and SNS from a URL, for the publisher and the source."""

import io
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final, Self
from urllib.parse import unquote

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.loaders import Loader

from pillarbox.outbox.brokers.sqs.options import SqsOptions
from pillarbox.outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    CredentialsError,
    PrerequisiteError,
    shorten,
)
from pillarbox.outbox.url import split, without_password

BROKEN: Final = (BotoCoreError, ClientError, OSError, TimeoutError)
MISSING: Final = {"QueueDoesNotExist", "NonExistentQueue", "NotFound"}
DENIED: Final = {"AccessDenied", "AuthorizationError", "KMSAccessDenied"}

# Shared, since otherwise each session spends 0.2 s on reading the service descriptions.
_LOADER: Final = Loader()
_LARGE: Final = 512 * 1024
_OF_THE_SETTINGS: Final = (NoRegionError, InvalidRegionError, ProfileNotFound)
_UNUSABLE: Final = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    *_OF_THE_SETTINGS,
)
_CREDENTIALS: Final = re.compile(
    r"InvalidClientTokenId|UnrecognizedClient|SignatureDoesNotMatch|ExpiredToken"
    r"|InvalidSignature|IncompleteSignature|MissingAuthenticationToken|InvalidSecurity"
    r"|InvalidAccessKeyId|OptInRequired"
)
_TEMPORARY: Final = re.compile(
    r"Throttl|RequestLimitExceeded|Unavailable|InternalError|InternalFailure|OverLimit"
    r"|RequestTimeout"
)
# Separators in topics; a name in AWS contains only letters, digits, - and _.
_SEPARATORS: Final = str.maketrans("./:", "---")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+(\.fifo)?")
_MAX_NAME: Final[Mapping[str, int]] = {"sqs": 80, "sns": 256}
_FIFO: Final = ".fifo"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqsSettings:
    """The settings of a broker URL: `sqs://key:secret@region/?option=…`, or `sns://`.

    Attributes:
        url: the URL in a form that is safe to print.
        identity: which queues or topics it leads to; see `BrokerOptions.identity`.
        service: `sqs` or `sns`.
        options: the options of the URL.
    """

    url: str
    identity: str
    service: str
    options: SqsOptions
    connection: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_url(cls, url: str) -> Self:
        """Read a URL.

        Raises:
            ConfigError: the URL is invalid.
        """
        name = without_password(url)
        rest, options = SqsOptions.parse(url)
        parts = split(rest)
        if parts.scheme not in SqsOptions.schemes:
            raise ConfigError(
                f"broker URL {name}: write sqs://region/ or sns://region/"
            )
        unknown = parts.path.strip("/") or parts.fragment
        if unknown:
            raise ConfigError(
                f"broker URL {name}: unexpected {shorten(unknown)}; write "
                f"{parts.scheme}://region/?option=value"
            )
        credentials, _, region = parts.netloc.rpartition("@")
        key, colon, secret = credentials.partition(":")
        if bool(key) != bool(secret):
            raise ConfigError(
                f"broker URL {name}: give both, sqs://key:secret@region/, or neither"
            )
        connection = {
            "region_name": region or None,
            "endpoint_url": options.endpoint_url,
            "aws_access_key_id": unquote(key) if colon else None,
            "aws_secret_access_key": unquote(secret) if colon else None,
        }
        return cls(
            url=name,
            identity=SqsOptions.identity(url),
            service=parts.scheme,
            options=options,
            connection={k: v for k, v in connection.items() if v is not None},
        )

    @property
    def prefix(self) -> str:
        """The prefix of the names of queues, or of SNS topics."""
        options = self.options
        if self.service == "sqs":
            return options.queue_prefix or ""
        return options.topic_prefix or ""

    def client(
        self, service: str, *, connections: int, read_timeout: float
    ) -> AbstractAsyncContextManager[Any]:
        """Return the context manager of a client, which connects with its first call.

        Raises:
            ConfigError: the region is invalid; raised when the context is entered.
        """
        config = AioConfig(
            max_pool_connections=connections,
            connect_timeout=5,
            read_timeout=read_timeout,
            tcp_keepalive=True,
            # A retry inside the client would silently repeat requests.
            retries={"total_max_attempts": 1, "mode": "standard"},
            # Validation takes a quarter of a request's time, and the parameters are
            # always valid.
            parameter_validation=False,
        )
        session = get_session()
        session.register_component("data_loader", _LOADER)
        session.register("before-send", _in_pieces)
        made: AbstractAsyncContextManager[Any] = session.create_client(
            service, config=config, **self.connection
        )
        return made

    async def open(
        self,
        stack: AsyncExitStack,
        first: Callable[[Any], Awaitable[object]],
        *,
        service: str,
        connections: int,
        read_timeout: float,
    ) -> Any:
        """Open a client, and call `first` with it; if that fails, close the stack.

        Raises:
            BrokerUnavailableError: AWS is unreachable.
            ConfigError: the credentials or the region are missing or wrong.
        """
        try:
            client = await stack.enter_async_context(
                self.client(service, connections=connections, read_timeout=read_timeout)
            )
            await first(client)
        except BaseException as error:
            await stack.aclose()
            if not isinstance(error, BROKEN):
                raise
            if unusable := self.unusable(error):
                raise unusable from None
            raise self.unavailable(error) from error
        return client

    def name_of(self, topic: str) -> str:
        """Return the name of a topic's queue, or of its SNS topic.

        Raises:
            ValueError: the topic can't have such a name; the message says why.
        """
        return resource_name(
            self.prefix + topic, fifo=self.options.fifo, limit=_MAX_NAME[self.service]
        )

    def unavailable(self, error: BaseException) -> BrokerUnavailableError:
        """Return an error that says why AWS is unavailable."""
        if isinstance(error, ClientError):
            refused = _CREDENTIALS.search(code_of(error))
            problem = "rejected the request" if refused else "is unavailable"
        elif isinstance(error, BROKEN):
            problem = "can't be reached"
        else:
            problem = "sent an answer that can't be read"
        text = " ".join(str(error).split()) or type(error).__name__
        return BrokerUnavailableError(f"broker {self.url} {problem}: {text}")

    def unusable(self, error: BaseException) -> ConfigError | None:
        """Return a ConfigError for wrong credentials or a wrong region; otherwise None.

        A retry can't fix such an error, unless the SDK reads the credentials elsewhere.
        """
        if isinstance(error, _UNUSABLE) or (
            isinstance(error, ClientError) and _CREDENTIALS.search(code_of(error))
        ):
            text = " ".join(str(error).split())
            # Those of the SDK's files and services may come or change.
            is_given = self.connection.get("aws_access_key_id") is not None
            is_final = is_given or isinstance(error, _OF_THE_SETTINGS)
            kind = CredentialsError if is_final else PrerequisiteError
            return kind(
                f"broker {self.url}: {text}; give them in the URL, "
                "sqs://key:secret@region/, or configure them as the AWS SDK expects"
            )
        return None


def _in_pieces(request: Any, **_: Any) -> None:
    # aiohttp warns about a large body that is written in one piece.
    body = request.body or b""
    if len(body) >= _LARGE:
        request.body = io.BytesIO(body.encode() if isinstance(body, str) else body)


def resource_name(text: str, *, fifo: bool, limit: int = _MAX_NAME["sqs"]) -> str:
    """Convert a text to a name in AWS: `.`, `/` and `:` become `-`.

    Raises:
        ValueError: the text has other invalid characters, or is too long.
    """
    name = text.translate(_SEPARATORS) + (_FIFO if fifo else "")
    if _NAME.fullmatch(name) is None:
        raise ValueError(
            f"{shorten(text)} is not a valid AWS name: use letters, digits, - and _ "
            "(., / and : become -)"
        )
    if len(name) > limit:
        raise ValueError(
            f"the name {shorten(name)} has {len(name)} characters, the limit of "
            f"AWS is {limit}"
        )
    return name


def is_fifo(name: str) -> bool:
    """Return whether a queue or topic of this name preserves the order in a group."""
    return name.endswith(_FIFO)


def code_of(error: ClientError) -> str:
    """Return the last part of an error's code, without the suffix that SDKs add."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return code.rpartition(".")[2].removesuffix("Exception")


def is_temporary(error: BaseException) -> bool:
    """Return whether the service or the credentials are at fault, not the request."""
    if not isinstance(error, ClientError):
        return True
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    code = code_of(error)
    return status >= 500 or bool(_CREDENTIALS.search(code)) or is_busy(code)


def is_busy(code: str) -> bool:
    """Return whether an error code, even a client error's, means to try again later."""
    return _TEMPORARY.search(code) is not None
