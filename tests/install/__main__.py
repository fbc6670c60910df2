"""Install the wheel without the lock file, and test the installation.

    python -m tests.install            core, README's extras and dev, from `add` to a
                                       handler, and the imports of each other extra
    python -m tests.install --full     all of them, from `add` to a handler
    python -m tests.install redis nats only these extras
    python -m tests.install --file dist/pillarbox-1.2.3.tar.gz none
                                       a wheel or sdist that is built already

Each set is installed at the lowest versions that pyproject.toml allows, and at the
newest. Prints a table, and exits with 1 if something failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final
from uuid import uuid4

from examples.shop.brokers import broker
from pillarbox.outbox.administration.migrate import migrate
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from tests.install.wheel import ROOT, build_wheel
from tests.servers.process import use_chosen_postgres

HERE: Final = Path(__file__).parent
README: Final = ROOT / "README.md"
UV: Final = Path(sys.executable).with_name("uv")
RESOLUTIONS: Final = {"lowest": "lowest-direct", "newest": "highest"}
BROKERS: Final = {
    "redis": "redis",
    "rabbitmq": "rabbitmq",
    "nats": "nats",
    "kafka": "kafka",
    "sqs": "sns",
    "http": "http",
}
"""The extras for brokers, and the private server of each."""
SCHEMAS: Final = ("jsonschema", "msgspec", "pydantic")
DRIVERS: Final = {"asyncio": "psycopg", "asyncpg": "asyncpg"}


class Environment:
    """A bare virtual environment with the wheel and some of its extras."""

    def __init__(self, folder: Path, python: str, extras: Sequence[str]) -> None:
        self._folder = folder
        self._extras = extras
        self._python = folder / "bin" / "python"
        self._application = folder / "application"
        run([UV, "venv", "--quiet", "--no-config", "--python", python, folder])
        self.python = run([self._python, "--version"]).split()[1]
        # Contains nothing else that could be imported.
        self._application.mkdir()
        shutil.copy(HERE / "app.py", self._application)

    def install(self, wheel: Path, resolution: str, *more: str) -> None:
        """Install the wheel by its own version bounds, without the lock file.

        Args:
            more: extras in addition to the environment's own.
        """
        extras = [*self._extras, *more]
        chosen = f"[{','.join(extras)}]" if extras else ""
        # An sdist of ours is built here; its build requirements are wheels.
        of_ours = () if wheel.suffix == ".whl" else ("--no-binary", "pillarbox")
        # Posted webhooks need a server, which pillarbox leaves to the user.
        others = ["uvicorn"] if "http" in contained(self._extras) else []
        run(
            # pyproject.toml gives the bounds: uv doesn't treat a wheel's as direct.
            [
                *(UV, "pip", "install", "--quiet", "--no-config"),
                *("--python", self._python),
                *("--resolution", RESOLUTIONS[resolution]),
                *("--only-binary", ":all:", *of_ours),
                *("--requirements", ROOT / "pyproject.toml"),
                *(f"--extra={extra}" for extra in extras),
                f"pillarbox{chosen} @ {wheel.as_uri()}",
                *others,
            ]
        )

    def probe(self, *arguments: str, **environment: str) -> None:
        """Run the probe in this environment."""
        run(
            [self._python, "-I", HERE / "probe.py", *arguments],
            cwd=self._application,
            env=clean_environment()
            | {"PYTHONPATH": str(self._application)}
            | environment,
        )


def run(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Run a command, and return its output.

    Raises:
        RuntimeError: it failed; the message is its output.
    """
    ended = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=env
    )
    if ended.returncode != 0:
        raise RuntimeError(f"{ended.stdout}{ended.stderr}".strip())
    return ended.stdout


def clean_environment() -> dict[str, str]:
    """Return this process's environment, less what names this venv or a database."""
    ours = ("PYTHON", "VIRTUAL_ENV", "PILLARBOX_", "APP_", "SHOP_")
    return {name: v for name, v in os.environ.items() if not name.startswith(ours)}


def documented_extras() -> list[str]:
    """Return the extras in README's install line for production."""
    (line,) = re.findall(r"pip install '\.\[(\w+,.+?)\]'", README.read_text())
    return str(line).split(",")


def declared_requirements() -> dict[str, list[str]]:
    """Return the requirements of each extra in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    return extras | {"": project["dependencies"]}


def contained(extras: Sequence[str]) -> list[str]:
    """Return these extras, and those that they consist of."""
    requirements = declared_requirements()
    found = [*extras]
    for extra in found:  # grows
        for parts in re.findall(r"pillarbox\[(.+?)\]", " ".join(requirements[extra])):
            found += [part for part in parts.split(",") if part not in found]
    return found


def send_messages(
    environment: Environment, extras: Sequence[str], server: PostgresServer
) -> None:
    """Send messages from `add` to the handler in each way that the extras offer."""
    for name, sessions, schema in ways(extras):
        database = f"installed_{uuid4().hex}"
        server.create_database(database)
        url = server.database_url(database)
        if "migrations" not in extras:
            migrate(url, with_cron=False)
        try:
            with broker_variables(name, url) as variables:
                environment.probe(
                    "messages",
                    name,
                    PILLARBOX_DATABASE_URL=url,
                    APP_EXTRAS=" ".join(extras),
                    APP_SESSIONS=sessions,
                    **({"APP_SCHEMA": schema} if schema else {}),
                    **variables,
                )
        finally:
            server.drop_database(database)


@contextmanager
def broker_variables(name: str, database: str) -> Iterator[Mapping[str, str]]:
    """Start a broker; yield the environment variables that lead to it."""
    if name == "http":
        port = str(free_port())
        target = f"http://127.0.0.1:{port}/?secret_env=SHOP_SECRET&allow_private=true"
        secret = "whsec_c2hvcC1zaG9wLXNob3Atc2hvcC1zaG9w"
        yield {
            "PILLARBOX_BROKER_URL": target,
            "SHOP_SECRET": secret,
            "SHOP_PORT": port,
        }
    else:
        with broker(name, database) as chosen:
            yield {"PILLARBOX_BROKER_URL": chosen}


def ways(extras: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the broker, sessions and schema of each way that is worth a test."""
    brokers = [BROKERS[extra] for extra in extras if extra in BROKERS]
    drivers = [DRIVERS[extra] for extra in extras if extra in DRIVERS]
    schemas = [extra for extra in extras if extra in SCHEMAS]
    for name in brokers:
        yield name, "plain", ""
    for driver in drivers:
        yield "postgres", driver, ""
    for schema in schemas:
        yield "postgres", "plain", schema
    if not (brokers or drivers or schemas):
        yield "postgres", "plain", ""


def main() -> int:
    """Run the tests that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.install", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    known = sorted(declared_requirements().keys() - {""})
    names = {"none": [], "readme": documented_extras(), "all": ["all"]}
    names |= {extra: [extra] for extra in known}
    complete = {(), ("dev",), tuple(documented_extras())}
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help=", ".join(names))
    parser.add_argument("--full", action="store_true", help="see above")
    parser.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help="install this wheel or sdist, instead of building a wheel",
    )
    parser.add_argument(
        "--python",
        action="append",
        metavar="PATH",
        help="for these interpreters, and not for the one that runs this",
    )
    options = parser.parse_args()
    if unknown := set(options.extras) - set(names):
        parser.error(f"no such extra: {', '.join(unknown)}")
    sets = [names[name] for name in options.extras or names]
    if "PIP_CERT" in os.environ:
        # uv doesn't read pip's variable.
        os.environ.setdefault("SSL_CERT_FILE", os.environ["PIP_CERT"])
    use_chosen_postgres()
    started = time.monotonic()
    results: list[bool] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        wheel = (
            options.file.resolve() if options.file else build_wheel(folder / "wheel")
        )
        url = os.environ.get("PILLARBOX_DATABASE_URL") or None
        server = stack.enter_context(postgres_server(url, durable=False))
        print("| Python | extras | versions | seconds | result |")
        print("|---|---|---|---|---|", flush=True)
        for python in options.python or [sys.executable]:
            for extras in sets:
                whole = options.full or bool(options.extras)
                whole |= tuple(extras) in complete
                for resolution in RESOLUTIONS:
                    environment = Environment(
                        folder / uuid4().hex, python, tuple(extras)
                    )
                    results.append(
                        passes(
                            environment, extras, resolution, wheel, server, whole=whole
                        )
                    )
    failed = results.count(False)
    seconds = time.monotonic() - started
    print(f"\n{results.count(True)} passed, {failed} failed in {seconds:.0f} s")
    return 1 if failed else 0


def passes(
    environment: Environment,
    extras: Sequence[str],
    resolution: str,
    wheel: Path,
    server: PostgresServer,
    *,
    whole: bool,
) -> bool:
    """Test one environment, add a line to the table, and return whether it passed."""
    started = time.monotonic()
    problem = None
    try:
        environment.install(wheel, resolution)
        environment.probe("imports", *contained(extras))
        if whole:
            if "cli" not in contained(extras):
                environment.install(wheel, resolution, "cli")
            environment.probe("commands")
            send_messages(environment, contained(extras), server)
    except (RuntimeError, ConfigError) as error:
        problem = str(error)
    name = "readme" if len(extras) > 1 else extras[0] if extras else "none"
    seconds = time.monotonic() - started
    result = "failed" if problem else "ok"
    print(
        f"| {environment.python} | {name} | {resolution} | {seconds:.0f} | {result} |",
        flush=True,
    )
    if problem:
        print(f"\n{problem}\n", file=sys.stderr, flush=True)
    return problem is None


if __name__ == "__main__":
    sys.exit(main())
