"""Idempotent handlers in consumers written with other frameworks."""
