"""The command line of the database's side, and what all commands share."""
