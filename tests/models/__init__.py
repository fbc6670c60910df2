"""Models of concurrent processes: every interleaving is tried, up to a bound."""
