"""Write messages in the same transaction as your business rows.

Start with `writer`, whose `add` puts messages into the caller's session. `message`
defines a message, `limits` its limits, `schema` its table and `lane` its place in the
order.

These modules need only SQLAlchemy. It is imported with the first use of `add` or
`insert_statement`, so that processes that don't write start faster and need less
memory. The subpackages serve the processes: `postgres`, `brokers`, `cloudevents`,
`dead_letters` and `observability` are the foundation of `relay` and `inbox`;
`administration` and `cli` are for their operators; `testing` is for tests.
"""

if __name__ == "outbox":
    raise ImportError("import pillarbox.outbox: as outbox, it would be loaded twice")
