"""Queues in a SQLite file: a sample of a third-party adapter.

`acme:///var/lib/acme` is a directory, which must exist; the file is created. The file
is opened for each call, so there is no connection to lose, and nothing to do when the
directory is available again.
"""
