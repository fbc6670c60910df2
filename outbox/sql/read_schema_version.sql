-- Does:  Read the version of the schema, before anything else is done with it.
-- Takes: nothing
-- Gives: version
-- Index: none, one row
SELECT version_num FROM outbox.alembic_version
