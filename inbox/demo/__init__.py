"""A shop with two consumers: `pillarbox demo` shows pillarbox from end to end.

`orders` is an application that adds messages, `consumers` one that handles them, and
`model` has their tables. The rest runs and checks the demo: `play` is the script,
and `tally` counts.
"""
