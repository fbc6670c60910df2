"""One module and its SQL files for each step of the schema."""
