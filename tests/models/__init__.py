"""Models of what runs side by side: every interleaving is tried, up to a bound."""
