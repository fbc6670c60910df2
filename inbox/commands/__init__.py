"""The subcommands of `inbox`, a file each."""
