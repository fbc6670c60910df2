"""Handlers: from registration to the call.

Read `registration` first: what a handler was registered with decides its kind. `routes`
finds the handler of a topic; `executor` is the contract of what calls it, with
`async_executor` and `thread_executor` as its implementations.
"""
