"""What a DBA sees: the partitions, the retention, the next run of pg_cron."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine, text

_HEALTH = text("""
    SELECT parent_table, partitions, oldest::date AS oldest, ahead, gaps, defaults,
           extract(day FROM retention)::int AS days
      FROM outbox.partition_health ORDER BY parent_table
""")
_JOB = text("SELECT schedule, command, username FROM cron.job WHERE jobname = :name")


def show_partitions(engine: Engine, say: Callable[[str], None]) -> None:
    """Print the partitions of every table, and when their upkeep runs next."""
    with engine.connect() as connection:
        for row in connection.execute(_HEALTH):
            say(
                f"partitions {row.parent_table:<19} {row.partitions:>3} days"
                f" from {row.oldest}, {row.ahead} ahead, {row.gaps} gaps,"
                f" kept {row.days} days"
            )
        if connection.execute(text("SELECT to_regclass('cron.job')")).scalar() is None:
            say("upkeep     no pg_cron here: call pillarbox maintain every hour")
            return
        job = connection.execute(_JOB, {"name": "pillarbox upkeep"}).one_or_none()
    if job is None:
        say("upkeep     not scheduled: run pillarbox migrate")
        return
    minute = job.schedule.split()[0]
    say(
        f"upkeep     {job.command} by {job.username}, next run"
        f" {next_hourly(int(minute)):%Y-%m-%d %H:%M} UTC ({job.schedule})"
    )


def next_hourly(minute: int) -> datetime:
    """Return when an hourly job at `minute` runs next."""
    now = datetime.now(UTC)
    at = now.replace(minute=minute, second=0, microsecond=0)
    return at if at > now else at + timedelta(hours=1)
