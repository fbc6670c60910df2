-- Does:  Read the version of pg_partman that is installed, and that of the server's package.
-- Takes: nothing
-- Gives: extversion, default_version
-- Index: none
SELECT e.extversion, a.default_version
  FROM pg_extension e JOIN pg_available_extensions a ON a.name = e.extname
 WHERE e.extname = 'pg_partman'
