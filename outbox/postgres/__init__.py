"""The use of a PostgreSQL server: connections, leases, locks, NOTIFY, SQL."""
