"""Handling of messages that kill the process that handles them.

Read `policy` first: for every source alike, it decides whether a message runs alongside
others, runs alone, or becomes a dead letter. `history` is what a source knows about the
earlier starts of a message, `store` counts the starts of suspects, and `isolation`
makes the other handlers wait while one runs alone.
"""
