"""Handlers: from registration to the call.

Read `registration` first: its arguments determine the kind of a handler. `routes` finds
the handler of a topic; `executor` runs handlers, `pool_executors` on connections of
psycopg.
"""
