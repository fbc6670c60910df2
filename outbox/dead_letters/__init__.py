"""Dead letters of both sides: one table layout, one implementation.

`letter` defines what is stored about a message that was dead-lettered. `criteria`
selects dead letters, `inspect` lists, shows and discards them. `retry` retries them
with a `Retrier`: the relay's publishes, the inbox's calls the handler. `schedule` does
so at fixed times. The commands are in
`pillarbox.outbox.cli.dead_letters`.
"""
