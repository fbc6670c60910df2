"""The path of a delivery to its handler and back: `fetch`, `dispatch`, `settlement`.

`pillarbox.inbox.consumer` connects these parts; read it first.
"""
