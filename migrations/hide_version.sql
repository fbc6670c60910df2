-- Owner part, run in the transaction of the revisions: until grants.sql has run, too, relays and consumers
-- that start find the schema too old, and wait.

REVOKE SELECT ON outbox.alembic_version FROM {relay}, {reader}, {consumer};
