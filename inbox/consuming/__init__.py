"""The way of a delivery to its handler and back: `fetch`, `dispatch`, `settlement`.

`inbox.consumer` puts these together; read it first.
"""
