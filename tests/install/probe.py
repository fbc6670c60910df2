"""Checks an environment that has the wheel; run by that environment's interpreter.

    python -I probe.py imports EXTRA…
    python -I probe.py commands
    python -I probe.py messages NAME

Prints each failure, and exits with 1 if there is one.
"""

import contextlib
import importlib
import io
import os
import pkgutil
import signal
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points, metadata
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

SCRIPTS = Path(sys.executable).parent
SECONDS = 120
ORDERS = 3
EFFECTS = (
    "CREATE TABLE effect (n integer)",
    """CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN NOTIFY effect; RETURN NULL; END $$""",
    "CREATE TRIGGER tell AFTER INSERT ON effect EXECUTE FUNCTION tell()",
    "LISTEN effect",
)

# The modules of each extra; all others need only the core.
MODULES = {
    "dev": ("pillarbox.inbox.demo",),
    "faststream": ("pillarbox.inbox.frameworks.faststream",),
    "http": ("pillarbox.relay.publishers.http",),
    "jsonschema": ("pillarbox.outbox.payload.validators.json_schema",),
    "kafka": (
        "pillarbox.inbox.sources.kafka",
        "pillarbox.outbox.brokers.kafka.connection",
        "pillarbox.outbox.brokers.kafka.message",
        "pillarbox.relay.publishers.kafka",
    ),
    "cli": (
        "pillarbox.inbox.cli",
        "pillarbox.outbox.cli",
        "pillarbox.outbox.observability.gathered",
        "pillarbox.outbox.observability.http_server",
        "pillarbox.relay.cli",
    ),
    "metrics": (
        "pillarbox.inbox.consuming.metrics",
        "pillarbox.outbox.observability.prometheus",
        "pillarbox.relay.metrics",
    ),
    "migrations": (
        "pillarbox.outbox.migrations.script",
        "pillarbox.outbox.migrations.versions",
    ),
    "msgspec": ("pillarbox.outbox.payload.validators.msgspec",),
    "nats": (
        "pillarbox.inbox.sources.nats",
        "pillarbox.outbox.brokers.nats.connection",
        "pillarbox.outbox.brokers.nats.client",
        "pillarbox.relay.publishers.nats",
    ),
    "otel": ("pillarbox.outbox.observability.opentelemetry",),
    "pydantic": ("pillarbox.outbox.payload.validators.pydantic",),
    "rabbitmq": (
        "pillarbox.inbox.sources.rabbitmq",
        "pillarbox.outbox.brokers.rabbitmq.amqp",
        "pillarbox.outbox.brokers.rabbitmq.connection",
        "pillarbox.outbox.brokers.rabbitmq.message",
        "pillarbox.relay.publishers.rabbitmq",
    ),
    "redis": (
        "pillarbox.inbox.sources.redis",
        "pillarbox.outbox.brokers.redis.connection",
        "pillarbox.relay.publishers.redis",
    ),
    "sqs": (
        "pillarbox.inbox.sources.sqs",
        "pillarbox.outbox.brokers.sqs.connection",
        "pillarbox.relay.publishers.sqs",
    ),
    "web": ("pillarbox.outbox.web",),
}
# These work only when Alembic, the demo or pytest runs them.
NOT_TRIED = (
    "pillarbox.inbox.demo.consumers",
    "pillarbox.inbox.testing",
    "pillarbox.outbox.migrations.env",
    "pillarbox.outbox.testing.conformance",
    "pillarbox.outbox.testing.plugin",
    "pillarbox.relay.testing",
)


def check_imports(extras: list[str]) -> Iterator[str]:
    """Import every module that these extras provide."""
    for name in modules():
        owner = next((e for e in MODULES if within(name, MODULES[e])), None)
        if owner is None or owner in extras:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001 (reports every module, not the first)
                yield f"import {name}:\n{traceback.format_exc()}"
    yield from check_refusals(extras)


def modules() -> Iterator[str]:
    """Yield the names of all of pillarbox's modules."""
    found = ["pillarbox"]
    while found:
        name = found.pop()
        if within(name, NOT_TRIED):
            continue
        yield name
        folders = [str(part) for part in path_of(name)]
        found += [m.name for m in pkgutil.iter_modules(folders, f"{name}.")]


def path_of(name: str) -> list[Path]:
    """Return a package's folder without importing it; empty for a module."""
    for entry in sys.path:
        folder = Path(entry, *name.split("."))
        if (folder / "__init__.py").exists():
            return [folder]
    return []


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Return whether a module is one of these packages, or inside one of them."""
    return any(
        name == package or name.startswith(f"{package}.") for package in packages
    )


def check_refusals(extras: list[str]) -> Iterator[str]:
    """Check that errors about a missing extra name it."""
    from pillarbox import ConfigError
    from pillarbox.outbox.brokers.plugins import implementation

    for group in ("pillarbox.publishers", "pillarbox.sources"):
        for point in entry_points(group=group):
            owner = next((e for e in MODULES if within(point.module, MODULES[e])), None)
            if owner is None or owner in extras:
                continue
            try:
                implementation(group, f"{point.name}://")
            except ConfigError as error:
                if f"'pillarbox[{owner}]'" not in str(error):
                    yield f"{group} {point.name}: doesn't name {owner}: {error}"
            except Exception:  # noqa: BLE001 (a finding like others)
                yield f"{group} {point.name}: {traceback.format_exc()}"
            else:
                # Another extra installs its library as well.
                continue
    if not extras:
        said = run("pillarbox", "--help", status=2)
        if "'pillarbox[cli]'" not in said:
            yield f"pillarbox: doesn't name the extra: {said}"
    if "cli" in extras and "migrations" not in extras:
        said = run("pillarbox", "migrate", "--sql", "all", status=2)
        if "'pillarbox[migrations]'" not in said:
            yield f"pillarbox migrate: doesn't name the extra: {said}"
    if "cli" in extras and "web" not in extras:
        said = run("pillarbox", "web", status=2)
        if "'pillarbox[web]'" not in said:
            yield f"pillarbox web: doesn't name the extra: {said}"
    for extra in ("faststream", "otel", "web"):
        if extra in extras:
            continue
        (name,) = MODULES[extra]
        try:
            importlib.import_module(name)
        except ImportError as error:
            if f"'pillarbox[{extra}]'" not in str(error):
                yield f"{name}: doesn't name the extra: {error}"


def check_commands() -> Iterator[str]:
    """Check that the console script starts, and that every command has a --help."""
    run("pillarbox", "--version")
    typer: Any = importlib.import_module("typer.main")
    cli: Any = importlib.import_module("pillarbox.outbox.cli.main")
    waiting: list[tuple[tuple[str, ...], Any]] = [((), typer.get_command(cli.app))]
    while waiting:
        words, command = waiting.pop()
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = cli.main([*words, "--help"])
        if status != 0:
            yield f"{' '.join(words)} --help: ended with {status}: {said.getvalue()}"
        inner = getattr(command, "commands", {})
        waiting += [((*words, name), inner[name]) for name in inner]


def check_messages(name: str) -> Iterator[str]:
    """Add, relay and handle orders: each once, and none that was rolled back."""
    extras = os.environ["APP_EXTRAS"].split()
    if "migrations" in extras:
        # pg_cron runs in only one database of a server, and not in this one.
        run("pillarbox", "migrate", "--without-cron")
    import psycopg

    url = os.environ["PILLARBOX_DATABASE_URL"]
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in EFFECTS:
            connection.execute(statement)
        listen = ["--listen", "127.0.0.1:0"] if "metrics" in extras else []
        # Without a broker, the consumer reads the database.
        drop = ["--broker", "memory://drop"] if name == "postgres" else []
        with consumer() as consuming:
            consuming.wait_for_line("Uvicorn running", "ConsumerStarted")
            add_orders()
            with Running("pillarbox", "relay", *listen, *drop) as relaying:
                if listen:
                    yield from check_metrics(relaying)
                deadline = time.monotonic() + SECONDS
                effects = 0
                while effects < ORDERS and time.monotonic() < deadline:
                    effects += len([*connection.notifies(timeout=1, stop_after=1)])
                    if not (consuming.is_running() and relaying.is_running()):
                        break
        found = connection.execute("SELECT n FROM effect ORDER BY n").fetchall()
        if found != [(1,), (2,), (3,)]:
            yield f"{name}: effects {found}, not 1, 2, 3"
            yield consuming.log()
            yield relaying.log()
        for process in (consuming, relaying):
            # Uvicorn dies from the signal that it receives.
            if process.status not in {0, -signal.SIGTERM}:
                yield f"{process.name}: ended with {process.status}: {process.log()}"


def add_orders() -> None:
    """Add three orders in two transactions, and one that is rolled back."""
    from pillarbox import InvalidMessageError, Message, add

    app: Any = importlib.import_module("app")
    if app.KIND == "plain":
        for numbers in ((1, 2), (4,), (3,)):
            with (
                contextlib.suppress(ZeroDivisionError),
                app.traced(),
                app.sessions.begin() as session,
            ):
                add(session, *(Message(app.TOPIC, {"n": n}, key="k") for n in numbers))
                1 / (4 - numbers[0])
    else:
        import asyncio

        asyncio.run(add_orders_async(app))
    if "APP_SCHEMA" in os.environ:
        with contextlib.suppress(InvalidMessageError):
            add(app.sessions(), Message(app.TOPIC, {"n": "one"}))
            raise RuntimeError("a payload that doesn't fit its schema was added")


async def add_orders_async(app: Any) -> None:
    """Add the same orders in an `AsyncSession`."""
    from pillarbox import Message, add

    for numbers in ((1, 2), (4,), (3,)):
        with contextlib.suppress(ZeroDivisionError), app.traced():
            async with app.sessions.begin() as session:
                add(session, *(Message(app.TOPIC, {"n": n}, key="k") for n in numbers))
                1 / (4 - numbers[0])
    await app.engine.dispose()


def check_metrics(relaying: "Running") -> Iterator[str]:
    """Check that the relay serves metrics."""
    line = relaying.wait_for_line("listening on")
    address = line.split("listening on ")[1].split()[0]
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        if "pillarbox_" not in answer.read().decode():
            yield "metrics: none of ours is served"


def consumer() -> "Running":
    """Return the process that handles the messages."""
    if "SHOP_SECRET" in os.environ:
        return Running("uvicorn", "app:hook", "--port", os.environ["SHOP_PORT"])
    return Running("pillarbox", "consume", "app:consumer")


class Running:
    """A console script of this environment, stopped after the block."""

    def __init__(self, name: str, *arguments: str) -> None:
        self.name = name
        self.status: int | None = None
        self._lines: list[str] = []
        self._new: Queue[str | None] = Queue()
        self._process = subprocess.Popen(
            [sys.executable, SCRIPTS / name, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> "Running":
        """Return the running process."""
        return self

    def __exit__(self, *_: object) -> None:
        """Terminate it, and wait until it ends."""
        self._process.terminate()
        try:
            self._process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self.status = self._process.wait()
        self._reader.join()

    def is_running(self) -> bool:
        """Return whether the process is still running."""
        return self._process.poll() is None

    def log(self) -> str:
        """Return its output so far."""
        return "".join(self._lines)

    def wait_for_line(self, *texts: str) -> str:
        """Wait for a line that contains one of these texts.

        Raises:
            RuntimeError: the process ended first.
        """
        while line := self._new.get(timeout=SECONDS):
            if any(text in line for text in texts):
                return line
        raise RuntimeError(f"{self.name}: ended before {texts}: {self.log()}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            self._new.put(line)
        self._new.put(None)


def run(command: str, *arguments: str, status: int = 0) -> str:
    """Run a console script to its end, and return its output."""
    ended = subprocess.run(
        [sys.executable, SCRIPTS / command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode != status:
        raise RuntimeError(f"{command}: ended with {ended.returncode}: {ended.stdout}")
    return ended.stdout


def main() -> int:
    """Run the check named on the command line."""
    what, *arguments = sys.argv[1:]
    provided = set(metadata("pillarbox").get_all("Provides-Extra") or ())
    sys.path.insert(0, str(Path.cwd()))
    try:
        match what:
            case "imports":
                unknown = {*MODULES, *arguments} - provided
                findings = [f"no such extra: {name}" for name in unknown]
                findings += check_imports(arguments)
            case "commands":
                findings = [*check_commands()]
            case _:
                findings = [*check_messages(*arguments)]
    except Exception:  # noqa: BLE001 (a finding like others)
        findings = [traceback.format_exc()]
    print("\n".join(findings))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
