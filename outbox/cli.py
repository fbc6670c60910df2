"""`outbox`: make the schema and look after it."""

from collections.abc import Sequence

from outbox.command import command
from outbox.command import main as run_command
from outbox.commands import doctor, maintain, migrate, partitions, retention


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; give its exit status."""
    parser = command("outbox", __doc__)
    subcommands = parser.add_subparsers(required=True, metavar="COMMAND")
    for subcommand in (migrate, maintain, partitions, retention, doctor):
        subcommand.add_to(subcommands)
    return run_command(parser, lambda arguments: arguments.run(arguments), argv)
