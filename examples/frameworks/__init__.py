"""Handlers that are called once, in consumers that are not ours."""
