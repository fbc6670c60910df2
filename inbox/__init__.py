"""Apply the effects of each message exactly once.

If you run your own consumer, start with `idempotent`: it guards a handler with a
`receipt`, in a `transaction` that the handler can't end. If you use the consumer of
this package, start with `consumer`: it fetches from a `source` (implemented in
`sources/`), dispatches and settles deliveries (`consuming/`), and runs `handlers/`,
long ones as `jobs/`. Messages that may kill the process run alone (`poison/`). Messages
that can't be handled are stored as `dead_letters/`.
"""

if __name__ == "inbox":
    raise ImportError("import pillarbox.inbox: as inbox, it would be loaded twice")
