"""What happens to a message that kills the process that handles it.

Read `policy` first: it decides, for every source alike, whether a message runs beside
others, runs alone, or becomes a dead letter. `history` is what a source says about the
earlier starts of a message, `store` is where the starts of suspects are counted, and
`isolation` is what makes the others wait while one runs alone.
"""
