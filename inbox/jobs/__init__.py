"""Long handlers, which run under a lease instead of in one transaction.

Read `runner` first. `job` is what a handler is called with, `lease` is a process's hold
on it, `store` is its row in `inbox.job`.
"""
