"""Queues in a SQLite file: an example of a third-party adapter.

`acme:///var/lib/acme` is a directory, which must exist; the file is created. The file
is opened for each call, so there is no connection to lose, and no reconnecting when the
directory is available again.
"""
