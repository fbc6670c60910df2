"""Guards for consumers written with other frameworks; each requires its own extra."""
