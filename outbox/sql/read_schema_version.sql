-- Does:  Read the version of the schema.
-- Takes: nothing
-- Gives: version
-- Index: none
SELECT version_num FROM outbox.alembic_version
