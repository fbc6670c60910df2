-- Does:  Read which pg_partman is installed, and which lies on the server.
-- Takes: nothing
-- Gives: extversion, default_version
-- Index: none
SELECT e.extversion, a.default_version
  FROM pg_extension e JOIN pg_available_extensions a ON a.name = e.extname
 WHERE e.extname = 'pg_partman'
