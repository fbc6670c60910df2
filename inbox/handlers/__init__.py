"""Handlers: how they are registered, prepared and run."""
