"""How we use a PostgreSQL server: connections, leases, locks, NOTIFY, SQL."""
