"""Makes the fixtures known to all tests."""

pytest_plugins = ["tests.fixtures.postgres", "tests.fixtures.redis"]
