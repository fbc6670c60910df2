"""The guard inside other people's consumers, each with an extra of its own."""
