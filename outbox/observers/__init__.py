"""Listeners to events that come with pillarbox."""
