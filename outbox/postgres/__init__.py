"""Use a PostgreSQL server: connections, leases, locks, NOTIFY, SQL."""
