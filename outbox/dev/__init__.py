"""`pillarbox dev`: a PostgreSQL that keeps its data, and other commands."""
