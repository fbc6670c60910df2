"""The rules for the source tree that no other tool checks."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import grimp
import pytest

from tests.clock.__main__ import DATABASE, LEFT_OUT

ROOT = Path(__file__).parent.parent
PACKAGES = ("outbox", "relay", "inbox")
SHIPPED = (*PACKAGES, "migrations")
FOLDERS = (*SHIPPED, "pillarbox", "examples", "benchmarks", "docs", "tests")
SQL_FILES = sorted(
    chain.from_iterable(
        (ROOT / p / "sql").glob("*.sql") for p in (*PACKAGES, "outbox/log")
    )
)

SAYS_NOTHING = re.compile(r"(utils?|helpers?|commons?|cores?|bases?|misc|types?|..?)")
BROKERS = tuple(
    sorted(
        page.stem
        for page in (ROOT / "docs" / "brokers").glob("*.md")
        if page.stem != "index"
    )
)
WITHOUT_SOURCE = {"http"}  # `pillarbox.inbox.webhook` receives posted messages
TEXTS = {
    *(".css", ".html", ".js", ".json", ".lock", ".md", ".py", ".sql", ".toml"),
    *(".txt", ".yaml", ".yml", "Makefile", "Dockerfile"),
}
ENDINGS = ("", ".py", ".md")
MOST_MODULES = 21
HEADER = ("-- Does: ", "-- Takes: ", "-- Gives: ", "-- Index: ")


def files(*suffixes: str) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                yield path.relative_to(ROOT)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def folders() -> Iterator[Path]:
    for package in SHIPPED:
        for init in (ROOT / package).rglob("__init__.py"):
            yield init.parent


@pytest.mark.parametrize("folder", sorted(folders()), ids=name_of)
def test_a_folder_can_be_read_at_a_glance(
    folder: Path,
) -> None:
    modules = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(modules) <= MOST_MODULES


@pytest.mark.parametrize("folder", sorted(folders()), ids=name_of)
def test_every_package_has_a_docstring(folder: Path) -> None:
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield str(node.module)


def test_a_package_is_imported_as_pillarboxs_and_never_as_a_folder() -> None:
    twice = {
        f"{path}: {name}"
        for path in files(".py")
        for name in imported(path)
        if name.partition(".")[0] in SHIPPED
    }
    assert twice == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_imported_from_the_root_is_refused(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"ImportError: import pillarbox.{package}: as {package}, it would be loaded "
        "twice\n"
    )


def test_the_import_contracts_see_every_module() -> None:
    ours = [path for path in files(".py") if path.parts[0] in (*SHIPPED, "pillarbox")]
    assert len(grimp.build_graph("pillarbox").modules) == len(ours)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tests_of_a_package_have_its_folders(package: str) -> None:
    tests = ROOT / "tests" / package
    rooms = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    assert {
        str(room) for room in rooms if not (ROOT / package / room).is_dir()
    } == set()


@pytest.mark.parametrize("broker", BROKERS)
def test_everything_about_a_broker_has_its_name(broker: str) -> None:
    rooms = ["outbox/brokers", "relay/publishers", "tests/brokers", "docs/brokers"]
    if broker not in WITHOUT_SOURCE:
        rooms.append("inbox/sources")
    missing = [
        room
        for room in rooms
        if not any((ROOT / room / f"{broker}{end}").exists() for end in ENDINGS)
    ]
    assert missing == []


def test_no_file_has_merge_conflict_markers() -> None:
    mark = re.compile(rb"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
    tree = [path for path in ROOT.iterdir() if not path.name.startswith(".")]
    paths = [path for entry in tree for path in (entry, *entry.rglob("*"))]
    texts = [path for path in paths if path.suffix in TEXTS or path.name in TEXTS]

    assert {ROOT / "README.md", ROOT / "docs" / "web.md"} <= set(texts)
    assert [name_of(path) for path in texts if mark.search(path.read_bytes())] == []


def test_each_adapter_belongs_to_a_broker_that_has_a_page() -> None:
    for room in ("relay/publishers", "inbox/sources"):
        adapters = {path.stem for path in (ROOT / room).glob("[a-z]*")}
        assert adapters <= set(BROKERS)


def test_every_module_has_a_meaningful_name() -> None:
    names = {path.with_suffix("") for path in files(".py")}
    names |= {path.parent for path in names}
    assert {str(path) for path in names if SAYS_NOTHING.fullmatch(path.name)} == set()


@cache
def callers_of_sql(package: str) -> list[tuple[Path, str]]:
    """Return the modules of a package that load SQL files, with their code."""
    code = {
        path: (ROOT / path).read_text()
        for path in files(".py")
        if path.parts[0] == package.partition(".")[0]
    }
    loads = (f'load("{package}", ', f'load_numbered("{package}", ')
    return [item for item in code.items() if any(load in item[1] for load in loads)]


@pytest.mark.parametrize("path", SQL_FILES, ids=name_of)
def test_each_sql_file_is_loaded_by_one_module(path: Path) -> None:
    callers = [
        module
        for module, code in callers_of_sql(".".join(path.relative_to(ROOT).parts[:-2]))
        for _ in range(code.count(f'"{path.stem}"'))
    ]
    assert len(callers) == 1, callers


@pytest.mark.parametrize("path", SQL_FILES, ids=name_of)
def test_each_sql_file_has_the_four_header_lines(path: Path) -> None:
    lines = path.read_text().splitlines()[: len(HEADER)]
    assert [line[: len(start)] for line, start in zip(lines, HEADER, strict=True)] == [
        *HEADER
    ]


def test_each_folder_of_tests_runs_under_other_clocks_or_has_a_reason_not_to() -> None:
    folders = {
        name_of(path)
        for path in (ROOT / "tests").iterdir()
        if path.is_dir() and any(path.rglob("*.py"))
    }
    inside = {name for name in DATABASE if name.count("/") == 1}

    assert folders == inside | set(LEFT_OUT)
    assert "tests/brokers/postgres" in DATABASE


def test_the_documentation_names_each_table_with_deletes() -> None:
    page = (ROOT / "docs" / "database.md").read_text()
    (said,) = re.findall(
        r"\*\*What is deleted row by row\.\*\*.*?\n\n", page, re.DOTALL
    )
    # A migration that drops tables is left out: it runs once.
    product = (
        path
        for path in files(".sql", ".py")
        if path.parts[0] in (*PACKAGES, "migrations") and path.stem != "0008_copy.up"
    )
    code = "\n".join((ROOT / path).read_text() for path in product)
    # What both schemas have is written once.
    code += code.replace("{schema}", "outbox") + code.replace("{schema}", "inbox")
    deleted = set(re.findall(r"DELETE FROM ((?:outbox|inbox|cron)\.\w+)", code))

    assert "inbox.suspect" in deleted
    assert set(re.findall(r"`(\w+\.\w+)`", said)) == deleted
