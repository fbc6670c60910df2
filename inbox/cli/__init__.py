"""The command line of the consumer's side."""
