"""Validation libraries, each imported when a schema of its kind is registered."""
