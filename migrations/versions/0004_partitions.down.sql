-- Owner part: forget the policy and the upkeep, and pg_partman its configuration.

SET LOCAL ROLE {owner};
DELETE FROM {partman}.part_config c USING outbox.partition_policy p WHERE c.parent_table = p.parent_table;
DROP VIEW outbox.partition_health;
DROP PROCEDURE outbox.maintain(integer);
DROP PROCEDURE outbox.trim_foreign_receipts();
DROP FUNCTION outbox.trim_foreign_receipts_batch(), outbox.drop_expired(text, regclass[]),
    outbox.make_partitions(text), outbox.adopt_table(text), outbox.partitions(text);
DROP TABLE outbox.partition_policy;
RESET ROLE;
