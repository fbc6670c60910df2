"""Test the guarantees with real processes that are killed, stopped and disconnected."""
