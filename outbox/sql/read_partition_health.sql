-- Does:  Read for each table how many partitions it has and how many lie ahead.
-- Takes: nothing
-- Gives: parent_table, follows, span, retention, premake, partitions, oldest, ahead, has_today, gaps
-- Index: none, reads the catalog
SELECT h.parent_table, p.follows, p.span, h.retention, h.premake, h.partitions, h.oldest, h.ahead, h.has_today, h.gaps
  FROM outbox.partition_health AS h
  JOIN outbox.partition_policy AS p USING (parent_table)
 ORDER BY coalesce(p.follows, p.parent_table), p.follows NULLS FIRST, p.parent_table
