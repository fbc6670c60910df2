-- Does:  Read what a reader of the outbox gets, and where it publishes.
-- Takes: reader
-- Gives: broker (null until its first relay has recorded it), topics (null: it was dropped), since_seq and since of the oldest subscription, refusal (why the role of this session may not run it); no row if there is no such reader
-- Index: reader_pkey, subscription_pkey
SELECT r.broker, array_agg(s.topic ORDER BY s.topic) FILTER (WHERE s.ended_at IS NULL), min(s.since_seq),
       (array_agg(s.since::text ORDER BY s.since_seq))[1],
       outbox.refusal(r.reader)
  FROM outbox.reader AS r
  JOIN outbox.subscription AS s USING (reader)
 WHERE r.reader = %(reader)s
   AND NOT s.is_discarded
 GROUP BY r.reader
