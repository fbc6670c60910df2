"""What `pillarbox dev` runs: a PostgreSQL that keeps its data, and other commands."""
