"""From the source to the handler and back: `fetch`, `dispatch`, `settlement`.

`inbox.consumer` puts these together; read it first.
"""
