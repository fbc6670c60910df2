"""Publishes committed messages to the broker.

Read `relay` first: it starts and drains the parts. Each `worker` takes one batch after
another through `claim`, `publish` and `settle`. `lanes/` tracks which messages can be
claimed, `wakeup` decides when to look for them, and `sweep` does the periodic work.
`publisher` is the contract with brokers; `publishers/` contains the implementations.
"""

if __name__ == "relay":
    raise ImportError("import pillarbox.relay: as relay, it would be loaded twice")
