"""A master, a replica and three Sentinels, which fail over to one another."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from redis import Redis
from typing_extensions import override

from pillarbox.outbox.testing.lifetime import private_directory
from tests.fixtures.waiting import wait_for
from tests.servers.redis.server import RedisServer, redis_program, redis_server

MASTER: Final = "mymaster"
_QUORUM: Final = 2
_SETTINGS: Final = {"repl-diskless-sync-delay": "0", "repl-timeout": "10"}
_CONFIGURATION: Final = f"""
sentinel monitor {MASTER} 127.0.0.1 {{port}} {_QUORUM}
sentinel down-after-milliseconds {MASTER} 2000
sentinel failover-timeout {MASTER} 5000
"""


class SentinelServer(RedisServer):
    """One Sentinel, which watches a master."""

    def __init__(self, program: str, directory: Path, master: RedisServer) -> None:
        super().__init__(program, directory, {})
        self._file = directory / "sentinel.conf"
        self._file.write_text(_CONFIGURATION.format(port=master.port))

    @override
    def command(self) -> Sequence[str]:
        own = ["--bind", "127.0.0.1", "--port", str(self.port)]
        return [self._program, str(self._file), "--sentinel", *own]

    def master_port(self) -> int:
        """Return the port of the master that it names."""
        with Redis.from_url(self.url) as client:
            return int(client.sentinel_get_master_addr_by_name(MASTER)[1])

    def knows_all(self) -> bool:
        """Return whether it has found the replica and the other Sentinels."""
        with Redis.from_url(self.url) as client:
            found = client.sentinel_master(MASTER)
            return (found["num-slaves"], found["num-other-sentinels"]) == (1, 2)


class RedisGroup:
    """Servers that fail over to one another.

    Attributes:
        master: the first master.
        replica: its replica.
    """

    def __init__(
        self,
        master: RedisServer,
        replica: RedisServer,
        sentinels: Sequence[SentinelServer],
    ) -> None:
        self.master = master
        self.replica = replica
        self._sentinels = sentinels
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in sentinels)
        self.url = f"redis+sentinel://{hosts}/{MASTER}"

    def wait_until_promoted(self) -> None:
        """Wait until all Sentinels name the replica as the master."""
        wait_for(
            "a failover",
            lambda: (
                {each.master_port() for each in self._sentinels} == {self.replica.port}
            ),
        )


@contextmanager
def redis_group(**settings: str) -> Iterator[RedisGroup]:
    """Run a master, its replica and three Sentinels.

    Args:
        settings: those of both servers, with `_` for `-`.
    """
    both = _SETTINGS | {name.replace("_", "-"): v for name, v in settings.items()}
    with ExitStack() as stack:
        master = stack.enter_context(redis_server(both))
        of = {"replicaof": f"127.0.0.1 {master.port}"}
        replica = stack.enter_context(redis_server(both | of))
        sentinels = []
        for _ in range(3):
            directory = stack.enter_context(private_directory("pillarbox-sentinel-"))
            sentinel = SentinelServer(redis_program(), directory, master)
            sentinels.append(stack.enter_context(sentinel.running()))
        for each in sentinels:
            wait_for("what it watches", each.knows_all)
        with Redis.from_url(replica.url) as client:
            wait_for(
                "replication",
                lambda: client.info("replication")["master_link_status"] == "up",
            )
        yield RedisGroup(master, replica, sentinels)
