"""Queues in a SQLite file: a sample of a third-party adapter.

`acme:///var/lib/acme` is a directory, which has to be there; the file is made. The
file is opened for each call, so there is no connection to lose, and nothing to do
when the directory comes back.
"""
