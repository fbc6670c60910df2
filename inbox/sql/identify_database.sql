-- Does:  Identify the database of the session, whatever its URL: the cluster, and the database in it.
-- Takes: nothing
-- Gives: one row: cluster, database
-- Index: none, reads the control file and the catalog
SELECT c.system_identifier AS cluster, d.oid AS database
  FROM pg_catalog.pg_control_system() AS c
  JOIN pg_catalog.pg_database AS d ON d.datname = pg_catalog.current_database()
