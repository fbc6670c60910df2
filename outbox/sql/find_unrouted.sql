-- Does:  Count the messages that no reader gets, with the days that they hold.
-- Takes: most (messages that are counted of each day), days (how many days to search, the newest ones; null: all)
-- Gives: is_first (whether there has never been a reader), messages, is_complete (whether all are counted, and no day is left out), topics (up to 10), more (how many topics were counted besides), oldest (when the oldest message was added), days, bytes (of these days); topics and oldest are null if there are none
-- Index: message_topic_idx of every partition; reads these messages, and all of a topic in days in which a reader of it began or ended
WITH filled AS MATERIALIZED (
    SELECT d.*, row_number() OVER (ORDER BY d.starts_at DESC) AS place
      FROM outbox.partitions('outbox.message') AS d
     WHERE NOT d.detach_pending AND NOT d.is_default AND pg_relation_size(d.partition) > 0
), unrouted AS MATERIALIZED (
    SELECT d.partition, m.*
      FROM filled AS d
     CROSS JOIN LATERAL (
           SELECT q.topic, count(*) AS messages, min(q.created_at) AS oldest
             FROM outbox.unrouted_in('outbox.message', d.starts_at, d.ends_at, %(most)s + 1) AS q
            GROUP BY q.topic
           ) AS m
     -- A session that opens many days for the first time takes longer than the search.
     WHERE (d.place <= %(days)s OR %(days)s::integer IS NULL)
       -- Usually one reader gets everything.
       AND NOT EXISTS (SELECT FROM outbox.subscription AS s WHERE s.topic = '*' AND s.since_seq = -1 AND s.ended_at IS NULL)
), day AS (
    SELECT sum(u.messages) AS messages, pg_total_relation_size(u.partition) AS bytes FROM unrouted AS u GROUP BY u.partition
), topic AS (
    SELECT array_agg(DISTINCT u.topic) AS names, min(u.oldest) AS oldest FROM unrouted AS u
)
SELECT NOT EXISTS (SELECT FROM outbox.subscription) AS is_first,
       coalesce(sum(least(d.messages, %(most)s)), 0)::bigint AS messages,
       coalesce(bool_and(d.messages <= %(most)s), true) AND NOT coalesce((SELECT count(*) FROM filled) > %(days)s, false) AS is_complete,
       (SELECT t.names[:10] FROM topic AS t) AS topics, (SELECT greatest(cardinality(t.names) - 10, 0) FROM topic AS t) AS more,
       (SELECT t.oldest FROM topic AS t) AS oldest,
       count(*) AS days, coalesce(sum(d.bytes), 0)::bigint AS bytes
  FROM day AS d
