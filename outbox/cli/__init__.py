"""The commands for the database, and the code that all commands share."""
