-- Does:  Find out whether a session may insert into tables.
-- Takes: tables (with their schemas)
-- Gives: one row: read_only (as on a standby, or by default_transaction_read_only), refused (the tables that lack the privilege), started_at (of the server)
-- Index: none, reads the catalog without locking a table
SELECT pg_catalog.current_setting('transaction_read_only')::boolean AS read_only,
       ARRAY(SELECT name FROM unnest(%(tables)s::text[]) AS name
              WHERE NOT has_any_column_privilege(name, 'INSERT')) AS refused,
       pg_catalog.pg_postmaster_start_time() AS started_at
