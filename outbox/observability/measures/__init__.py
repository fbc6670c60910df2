"""Measurements in the database, by subject; `overview.py` combines them."""
