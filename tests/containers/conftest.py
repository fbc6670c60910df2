"""The container tests run only if a Docker engine has the images."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.engine import Project, has_image, running_project

IMAGES = ("pillarbox", "pillarbox-postgres")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(1800))


@pytest.fixture(scope="session", autouse=True)
def _images() -> None:
    if not all(has_image(image) for image in IMAGES):
        pytest.skip("no Docker engine with the images answers: run make containers")


@pytest.fixture(scope="module")
def shop() -> Iterator[Project]:
    """The shop with PostgreSQL as its broker."""
    with running_project() as project:
        yield project
