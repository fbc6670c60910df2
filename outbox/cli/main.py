"""`outbox`: make the schema and look after it."""

from collections.abc import Sequence

from outbox.cli import doctor, maintain, migrate, partitions, retention
from outbox.cli.command import command
from outbox.cli.command import main as run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("outbox", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for subcommand in (migrate, maintain, partitions, retention, doctor):
        subcommand.add_to(subcommands)
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)
