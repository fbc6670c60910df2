"""Long handlers, which run under a lease instead of in a single transaction.

Read `runner` first. `job` is what a long handler is called with, `lease` is a process's
hold on the job, and `store` accesses its row in `inbox.job`.
"""
