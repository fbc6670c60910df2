#!/bin/sh
# Runs once, when the data directory is new, before the server listens on the network.
# The lines stay in postgresql.conf, where the DBA can change them.
set -eu

cat >>"$PGDATA/postgresql.conf" <<SETTINGS

# pg_cron runs the upkeep of the partitions, in this database only.
shared_preload_libraries = 'pg_cron'
cron.database_name = '${POSTGRES_DB:-${POSTGRES_USER:-postgres}}'
# Its jobs are background workers, so that they need no password and no pg_hba.conf.
cron.use_background_workers = on
max_worker_processes = 16
# Partitions begin at midnight, UTC.
timezone = 'UTC'
SETTINGS
