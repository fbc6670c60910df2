-- Does:  List the readers of the outbox, with what each has still to publish.
-- Takes: reader (null: all), most (messages that are counted of each)
-- Gives: reader, broker, role, topics, discards, created_at, dropped_at, messages (up to most), oldest (when its oldest message was created)
-- Index: message_lane_idx above the positions; reads the log
SELECT r.reader, r.broker, r.role, s.topics, s.discards, r.created_at, s.dropped_at, open.messages, oldest.created_at AS oldest
  FROM outbox.reader AS r
  JOIN (
       -- What it gets, or got until it was dropped last.
       SELECT s.reader, array_agg(s.topic ORDER BY s.topic) AS topics, bool_and(s.is_discarded) AS discards, max(s.ended_at) AS dropped_at
         FROM (SELECT q.*, rank() OVER (PARTITION BY q.reader ORDER BY q.ended_at DESC NULLS FIRST) AS place FROM outbox.subscription AS q) AS s
        WHERE s.place = 1
        GROUP BY s.reader
       ) AS s USING (reader)
 CROSS JOIN LATERAL (
       SELECT count(*) AS messages
         FROM (SELECT FROM outbox.unsettled_message AS m WHERE m.reader = r.reader LIMIT %(most)s) AS m
       ) AS open
 CROSS JOIN LATERAL (
       SELECT least((SELECT min(m.created_at)
                       FROM outbox.last_positions() AS p
                      CROSS JOIN LATERAL (
                            SELECT q.created_at
                              FROM outbox.message AS q
                             WHERE p.last_seq > p.up_to AND q.lane = p.lane AND q.seq > p.up_to AND q.created_at >= p.starts_at AND q.created_at < p.ends_at
                               AND (q.tenant IS NULL  -- else the log can have it already
                                    OR (SELECT true FROM outbox.deferral AS e WHERE e.id = q.id AND e.created_at = q.created_at AND (e.reader = p.reader) IS TRUE LIMIT 1) IS NULL)
                               AND EXISTS (SELECT FROM outbox.subscription AS s
                                            WHERE s.reader = p.reader
                                              AND outbox.brings(s, q.topic, q.seq, q.xid, (SELECT max(b.seq) FROM outbox.base AS b)))
                             ORDER BY q.seq
                             LIMIT 1
                            ) AS m
                      WHERE p.reader = r.reader AND open.messages > 0),
                    (SELECT min(d.created_at) FROM outbox.deferred_message AS d WHERE d.reader = r.reader)) AS created_at
       ) AS oldest
 WHERE r.reader = %(reader)s OR %(reader)s::text IS NULL
 ORDER BY s.dropped_at IS NOT NULL, r.created_at, r.reader
