"""A shop with two consumers: the main job of pillarbox from end to end.

`orders` is what an application looks like that adds messages, `consumers` is what
one looks like that handles them, `model` has their tables. The rest runs and checks
the show: `__main__` tells it, `outage` has billing fail and recover, `processes` starts
and kills, `tally` counts.
"""
