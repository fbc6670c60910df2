"""A shop with two consumers: pillarbox from end to end.

`orders` shows an application that adds messages, `consumers` one that handles them, and
`model` defines their tables. The rest runs and checks the demo: `__main__` is the
script, `outage` makes billing fail and recover, `processes` starts and kills processes,
and `tally` counts.
"""
