"""What the database shows, by subject; `overview.py` puts it together."""
