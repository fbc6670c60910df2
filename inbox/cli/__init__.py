"""The consumer's command line."""
