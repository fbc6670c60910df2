"""The guard for consumers written with other frameworks; each needs its own extra."""
