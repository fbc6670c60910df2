-- Does:  Read the topics of a reader of the outbox, and where it publishes.
-- Takes: reader
-- Gives: broker (null until its first relay has recorded it), topics (null: it was dropped), since_seq and since (where it began: those of its first topic), gets_all (whether it has got everything since then), refusal (why the role of this session may not run it); no row if there is no such reader, or it discards its messages
-- Index: reader_pkey, subscription_pkey
SELECT r.broker, s.topics, coalesce(s.since_seq, -1), coalesce(s.since, '1:1:'), coalesce(s.first = '*', false),
       outbox.refusal(r.reader)
  FROM outbox.reader AS r
 CROSS JOIN (
       SELECT array_agg(s.topic ORDER BY s.topic), min(s.since_seq), bool_or(s.is_discarded),
              (array_agg(s.since::text ORDER BY pg_snapshot_xmax(s.since), pg_column_size(s.since) DESC))[1],
              (array_agg(s.topic ORDER BY pg_snapshot_xmax(s.since), pg_column_size(s.since) DESC, s.topic <> '*'))[1]
         FROM outbox.subscription AS s
        WHERE s.reader = %(reader)s
          AND s.ended_at IS NULL
       ) AS s (topics, since_seq, is_discarded, since, first)
 WHERE r.reader = %(reader)s
   AND s.is_discarded IS NOT TRUE
