"""Handlers: from registration to the call.

Read `registration` first: its arguments determine the kind of a handler. `routes` finds
the handler of a topic; `executor` is the protocol for running handlers, implemented by
`async_executor` and `thread_executor`.
"""
