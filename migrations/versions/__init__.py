"""A module for each version of the schema, and its SQL files."""
