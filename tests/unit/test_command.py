"""Where the commands find their URLs."""

from pathlib import Path

import pytest

from outbox.cli.command import url_of
from outbox.errors import ConfigError

VARIABLE = "PILLARBOX_DATABASE_URL"
URL = "postgresql://relay:secret@db/app"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv(f"{VARIABLE}_FILE", raising=False)


def test_the_option_goes_before_the_variable_and_that_before_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "url"
    file.write_text(f"{URL}\n")
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(file))
    assert url_of(None, "database", VARIABLE) == URL
    monkeypatch.setenv(VARIABLE, "postgresql://variable")
    assert url_of(None, "database", VARIABLE) == "postgresql://variable"
    assert url_of("postgresql://option", "database", VARIABLE) == "postgresql://option"


def test_without_any_the_error_names_all_three() -> None:
    with pytest.raises(ConfigError, match=f"--database URL.*{VARIABLE}.*_FILE"):
        url_of(None, "database", VARIABLE)


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_is_missing_or_no_text_is_named_but_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "url"
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv(f"{VARIABLE}_FILE", str(file))
    with pytest.raises(ConfigError, match=f"{VARIABLE}_FILE={file}"):
        url_of(None, "database", VARIABLE)
