"""Import paths of commands: the object they name, and where an import failed."""

from pathlib import Path

import pytest

from pillarbox.inbox.consuming.load import load_consumer
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.import_path import import_object


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(path: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_consumer(path)
    said = str(refused.value)
    assert "\n" not in said
    return said


def test_the_object_that_a_path_names_is_found(folder: Path) -> None:
    (folder / "import_good.py").write_text("class Apps:\n    codec = 'it'\n")
    assert import_object("codec", "import_good:Apps.codec") == "it"


@pytest.mark.parametrize("path", ["app", ":consumer", "app:", ""])
def test_an_invalid_path_is_refused(path: str) -> None:
    assert "write module:name, e.g. app:consumer" in refusal(path)


def test_a_missing_module_is_distinguished_from_one_that_fails(folder: Path) -> None:
    (folder / "import_missing.py").write_text("import os\n\nimport import_nowhere\n")
    (folder / "import_outer.py").write_text("import import_inner\n")
    (folder / "import_inner.py").write_text("\n1 / 0\n")
    (folder / "import_package").mkdir()
    (folder / "import_package" / "__init__.py").write_text("")

    not_there = refusal("import_nowhere:consumer")
    assert f"No module named 'import_nowhere' in {folder}" in not_there
    assert "set PYTHONPATH" in not_there
    in_a_package = refusal("import_package.app:consumer")
    assert "No module named 'import_package.app' in" in in_a_package
    fails = refusal("import_missing:consumer")
    assert "can't import 'import_missing': ModuleNotFoundError" in fails
    assert fails.endswith(f"({folder / 'import_missing.py'}, line 3)")
    inside = refusal("import_outer:consumer")
    assert inside.endswith(f"({folder / 'import_inner.py'}, line 2)")


@pytest.mark.parametrize(
    ("code", "error", "line"),
    [
        ("import os\nfrom os import nothing\n", "ImportError: cannot import name", 2),
        ("x = 1\n\nx.y\n", "AttributeError: 'int' object", 3),
        ("x = 1\nx = = 2\n", "SyntaxError: invalid syntax", 2),
        ("import json\n\n\njson.loads('{')\n", "JSONDecodeError: Expecting", 4),
    ],
)
def test_the_error_names_the_line_where_an_import_fails(
    folder: Path, code: str, error: str, line: int
) -> None:
    name = f"import_broken_{line}"
    (folder / f"{name}.py").write_text(code)

    said = refusal(f"{name}:consumer")

    assert f"can't import '{name}': {error}" in said
    assert said.endswith(f"({folder / name}.py, line {line})")


def test_the_error_for_a_missing_name_or_a_factory_that_fails_names_the_file(
    folder: Path,
) -> None:
    code = "consumers = 1\n\ndef make():\n    raise KeyError('URL')\n"
    (folder / "import_named.py").write_text(code)

    assert refusal("import_named:consumer").endswith(
        f"'consumer' is not in import_named ({folder / 'import_named.py'})"
    )
    assert "must be a Consumer, or a function that returns one, not a int" in refusal(
        "import_named:consumers"
    )
    said = refusal("import_named:make")
    assert "'make' raised KeyError: 'URL'" in said
    assert said.endswith(f"({folder / 'import_named.py'}, line 4)")
