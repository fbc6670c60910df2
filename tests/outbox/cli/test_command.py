"""`pillarbox`: the behavior that all commands share."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from typer.main import get_command

from pillarbox.outbox.cli.command import url_of
from pillarbox.outbox.cli.main import app, main
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.processes import command_line

VARIABLE = "PILLARBOX_DATABASE_URL"
URL = "postgresql://relay:secret@db/app"


@pytest.fixture(autouse=True)
def _no_url_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(f"{VARIABLE}_FILE", raising=False)


def test_the_option_overrides_the_variable_and_the_variable_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"--database URL.*{VARIABLE}.*_FILE"):
        url_of(None, "database", VARIABLE)
    file = tmp_path / "url"
    file.write_text(f"{URL}\n")
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(file))
    assert url_of(None, "database", VARIABLE) == URL
    monkeypatch.setenv(VARIABLE, "postgresql://variable")
    assert url_of(None, "database", VARIABLE) == "postgresql://variable"
    assert url_of("postgresql://option", "database", VARIABLE) == "postgresql://option"


def test_a_binary_file_is_named_but_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "url"
    file.write_bytes(b"\xff\xfe")
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(file))
    with pytest.raises(ConfigError, match=f"{VARIABLE}_FILE={file}"):
        url_of(None, "database", VARIABLE)


def without_boxes(said: str) -> str:
    """Return the help as running text, without the boxes."""
    return " ".join(said.translate(dict.fromkeys(map(ord, "│╭╮╰╯─"), " ")).split())


def test_without_arguments_the_help_shows_the_commands_in_their_groups(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([]) == 0
    said = without_boxes(capsys.readouterr().out)
    names = [
        *("The database", "migrate", "doctor", "status", "partitions", "retention"),
        *("maintain", "The relay", "relay", "readers", "The consumer", "consume"),
        *("jobs", "cancel", "Repair"),
        *("dead-letters", "blocked", "replay"),
    ]
    places = [said.index(f"{name} ", said.index("The database")) for name in names]
    assert places == sorted(places)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pillarbox {version('pillarbox')}\n"


def test_the_list_of_commands_says_what_their_own_help_says() -> None:
    group: Any = get_command(app)
    for name in group.commands:
        listed, loaded = group.get_command(None, name), group.commands[name]
        assert listed.help == loaded.help.partition("\n\n")[0].replace("\n", " ")


def every_command() -> Iterator[tuple[tuple[str, ...], Any]]:
    waiting: list[tuple[tuple[str, ...], Any]] = [((), get_command(app))]
    while waiting:
        words, command = waiting.pop()
        inner = getattr(command, "commands", {})
        waiting += [((*words, name), inner[name]) for name in inner]
        if not inner:
            yield words, command


WITHOUT_REPORT = {
    "asyncapi",  # prints JSON
    *("migrate", "relay", "replay", "consume", "cancel"),
    *("discard", "retry"),
    *("demo", "dev", "web"),
    *("add", "drop", "pause", "resume"),
    "export",  # its output is JSON lines anyway
}


def test_every_option_has_an_environment_variable_that_its_help_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 200)
    for words, command in every_command():
        assert main([*words, "--help"]) == 0
        said = without_boxes(capsys.readouterr().out)
        prefix = "_".join(["PILLARBOX", *words]).replace("-", "_").upper()
        options = [it for it in command.params if it.param_type_name == "option"]
        for option in options:
            own = f"{prefix}_{option.name.upper()}"
            assert f"[env var: {option.envvar or own}]" in said, words
            assert option.opts[0] in said, words
        names = {name for option in options for name in option.opts}
        assert {"--log-level", "--log-format"} <= names, words
        assert "--json" in names or words[-1] in WITHOUT_REPORT, words


def test_an_option_overrides_its_environment_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PILLARBOX_RELAY_BATCH_SIZE", "0")
    urls = ["--database=postgresql://h/d", "--broker=memory://"]
    assert main(["relay", *urls]) == 2
    assert "batch_size=0: must be at least 1" in capsys.readouterr().err
    assert main(["relay", *urls, "--batch-size=-7"]) == 2
    assert "batch_size=-7: must be at least 1" in capsys.readouterr().err


def test_an_invalid_argument_is_named_with_what_is_valid_and_without_a_password(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["relay", "--lease", "30m1h"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "pillarbox relay: Invalid value for '--lease': '30m1h': write 90s, 15m, 6h, "
        "7d, 2w or 1h30m; see pillarbox relay --help"
    )
    assert main(["doctor", URL]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "(postgresql://relay@db/app)" in line, "an argument in the wrong place"
    assert main(["partition"]) == 2
    assert "Did you mean 'partitions'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "url",
    [
        "host=db user=me password=hemlighet",
        "host=db port=5432 password='hem:lighet hemlighet'",
        "password=x://hemlighet host=db",
        " postgresql://me:hemlighet@db/app",
        "hemlighet",
        "me:hemlighet@db",
    ],
)
def test_what_is_given_as_a_url_and_is_none_is_not_shown(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, broker = f"--database={url}", f"--broker={url}"
    there = "--database=postgresql://127.0.0.1:1/app"
    for arguments in (
        ["status", here],
        ["doctor", here],
        ["migrate", here],
        ["migrate", "--remove", "app", here],
        ["maintain", here],
        ["relay", here, "--broker=memory://drop"],
        ["relay", there, broker],
        ["readers", "add", "hooks", "--topic=*", there, broker],
        ["dead-letters", "list", here],
        *([["status", url]] if url != "hemlighet" else []),
    ):
        assert main(arguments) == 2, arguments
        said = capsys.readouterr()
        assert "hemlighet" not in (said.out + said.err).partition("; see")[0], arguments
    monkeypatch.setenv(f"{VARIABLE}_FILE", f"{url} password=hemlighet")
    with pytest.raises(ConfigError) as refused:
        url_of(None, "database", VARIABLE)
    assert "password=hemlighet" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "variable", "level"),
    [
        ([], None, "INFO"),
        ([], "warning", "WARNING"),
        (["--log-level=error"], "warning", "ERROR"),
    ],
)
def test_the_log_level_is_that_of_the_option_or_the_variable(
    options: list[str],
    variable: str | None,
    level: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr("logging.basicConfig", lambda **it: chosen.append(it["level"]))
    if variable:
        monkeypatch.setenv("PILLARBOX_LOG_LEVEL", variable)
    assert main(["jobs", *options]) == 2  # no database was given
    assert chosen == [level]


def outcome(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in Python."""
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


TELL = """
import logging
from pillarbox.inbox.events import HandlerFailed
from pillarbox.outbox.cli.command import command, new_app
from pillarbox.outbox.observability.logging import LogEvents
from pillarbox import uuid7

app = new_app()


@command(app)
def tell():
    logging.getLogger("pillarbox").warning("a\\nb", extra={"event": "E"})
    logging.getLogger("alembic.runtime.plugins").info("chatter")
    LogEvents()(HandlerFailed(
        consumer="billing", id=uuid7(), topic="t", key="k", attempts=1, reason="no",
        seconds_until_retry=0.5, stacktrace="Traceback\\n  x",
        traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"))
    logging.getLogger("botocore.endpoint").debug("confidential")
    logging.getLogger("botocore.endpoint").info("retried")
    logging.getLogger("pillarbox").debug("in detail")


app()
"""


def test_logs_are_json_on_request_and_events_have_name_fields_and_trace() -> None:
    records = [
        json.loads(line)
        for line in outcome(TELL, "--log-format=json").stderr.splitlines()
    ]
    first, event, last = records
    assert first["message"] == "a\nb"
    assert (first["level"], first["event"]) == ("WARNING", "E")
    assert last["message"] == "retried"
    assert (event["level"], event["event"]) == ("INFO", "HandlerFailed")
    assert event["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert datetime.fromisoformat(event["time"]).utcoffset() == timedelta(0)
    fields = event["fields"]
    assert UUID(fields.pop("id")).version == 7
    assert fields == {
        "consumer": "billing",
        "topic": "t",
        "key": "k",
        "attempts": 1,
        "reason": "no",
        "seconds_until_retry": 0.5,
        "stacktrace": "Traceback\n  x",
    }
    assert "Traceback" not in event["message"]


def test_debug_applies_to_pillarbox_only_because_clients_log_payloads() -> None:
    said = outcome(TELL, "--log-level=debug").stderr
    assert "INFO retried\n" in said
    assert "DEBUG in detail\n" in said
    assert "confidential" not in said
    assert "WARNING a\n    b\n" in said, "it can't look like another record"


def test_a_closed_pipe_ends_a_command_silently() -> None:
    line = shlex.join(command_line("pillarbox", "relay", "--help"))
    done = subprocess.run(
        ["bash", "-c", f"{line} | true; echo ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("141\n", "")


def test_help_loads_no_broker_and_no_other_command() -> None:
    program = (
        "import sys\n"
        "from pillarbox.outbox.cli.main import main\n"
        "main(sys.argv[1:])\n"
        "print('LOADED', *sys.modules)"
    )

    def loaded(*arguments: str) -> set[str]:
        return set(outcome(program, *arguments).stdout.rpartition("LOADED ")[2].split())

    brokers = {"confluent_kafka", "nats", "pika", "redis", "aiobotocore", "aiohttp"}
    assert not loaded("--help") & {*brokers, "alembic", "pydantic", "pythonjsonlogger"}
    migrate = "pillarbox.outbox.cli.migrate"
    assert not {"pillarbox.inbox", migrate} & loaded("relay", "--help")
    assert not {"pillarbox.relay", migrate} & loaded("consume", "--help")


COMPLETE = """
{script}
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_pillarbox_completion pillarbox
echo "${{COMPREPLY[@]}}"
"""


def test_bash_completes_commands_options_and_values() -> None:
    """Run the script that users install, in the real shell."""
    environment = {
        **os.environ,
        "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }

    def run(*command: str) -> str:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, env=environment
        ).stdout

    script = run(*command_line("pillarbox", "--show-completion", "bash"))
    for words, offered in {
        "pillarbox part": "partitions",
        "pillarbox dead-letters ret": "retry",
        "pillarbox relay --batch": "--batch-size",
        "pillarbox jobs --state in_": "in_progress",
    }.items():
        program = COMPLETE.format(script=script, words=words)
        assert (words, run("bash", "-c", program)) == (words, f"{offered}\n")


def test_without_typer_the_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(name='typer')")
    done = subprocess.run(
        command_line("pillarbox", "doctor"),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == (
        "pillarbox: the command line needs typer: pip install 'pillarbox[cli]'\n"
    )


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/app"
        process = subprocess.Popen(
            command_line("pillarbox", "jobs", "--database", url),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        # The command has connected and waits for an answer.
        connection, _ = silent.accept()
        with connection:
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, (b"", b""))
