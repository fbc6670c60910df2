"""One module and two SQL files for each step of the schema."""
