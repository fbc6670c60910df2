-- Does:  List partitions past their retention, and whether they are hours late.
-- Takes: nothing
-- Gives: step, parent_table, partition, unsettled, reason, statement, late, the table's owner (if the partition has another)
-- Index: none
SELECT p.step, p.parent_table, p.partition, p.unsettled, p.reason, p.statement,
       coalesce(r.planned_at, p.ends_at + q.retention) < now() - interval '3 hours',
       CASE WHEN c.relowner <> o.relowner THEN o.relowner::regrole::text END
  FROM outbox.upkeep_plan() p JOIN outbox.partition_policy q USING (parent_table)
  LEFT JOIN outbox.retiring_partition r ON r.partition = p.partition
  JOIN pg_class o ON o.oid = p.parent_table::regclass
  JOIN pg_class c ON c.oid = to_regclass(p.partition)
 WHERE p.step IN ('hold', 'attach', 'detach', 'finalize', 'drop')
