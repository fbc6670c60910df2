-- Owner part, repeated at the end of every migration: transaction ids are only valid in their cluster.
-- From now on, the seq alone decides whether a position covers the rows that exist now. Rows that it doesn't cover
-- by their ids, which the rows still have, get an entry.

DO $rebase$
DECLARE
    v_cluster text := split_part(outbox.cluster(), '/', 1);
    v_before bigint := (SELECT max(b.seq) FROM outbox.base AS b);
    v_last bigint;
BEGIN
    -- Its own row is not enough: tables can come back, or a logical replica was migrated before it got the rows.
    IF EXISTS (SELECT FROM outbox.base AS b
                WHERE b.cluster = v_cluster
                  AND b.seq > ALL (SELECT other.seq FROM outbox.base AS other WHERE other.cluster <> b.cluster))
    THEN
        RETURN;
    END IF;
    -- No rows can be added to these later: this waits for all writers.
    LOCK TABLE outbox.message IN SHARE ROW EXCLUSIVE MODE;
    -- Not the positions: a relay may store any, and these rows are found whatever they say.
    v_last := greatest((SELECT q.last_value FROM outbox.message_seq AS q), v_before + 1,
                       (SELECT max(top.seq)
                          FROM generate_series(0, 47) AS l (lane)
                         CROSS JOIN LATERAL (SELECT m.seq FROM outbox.message AS m
                                              WHERE m.lane = l.lane ORDER BY m.seq DESC LIMIT 1) AS top));
    PERFORM setval('outbox.message_seq', v_last);
    -- Where readers began that have stored no position yet: rows above were not there.
    WITH last AS MATERIALIZED (
        SELECT p.reader, p.lane, p.starts_at, p.ends_at, p.last, max((p.last).number) OVER (PARTITION BY p.reader, p.lane) + 1 AS number
          FROM outbox.last_positions(everywhere => true) AS p
         WHERE (p.last).up_to >= 0
    ), found AS MATERIALIZED (
        SELECT m.id, m.created_at, m.seq, m.lane, CASE WHEN octet_length(m.key) <= 2048 THEN m.key END AS key,
               m.available_at, CASE WHEN m.available_at > m.created_at THEN 'scheduled' ELSE 'found' END AS cause, p.starts_at, p.reader
          FROM last AS p
          JOIN outbox.message AS m ON m.lane = p.lane AND m.seq <= (p.last).up_to
                                  AND m.created_at >= p.starts_at AND m.created_at < p.ends_at
         WHERE NOT outbox.covers(p.last, m.seq, m.xid, v_before)
           AND EXISTS (SELECT FROM outbox.subscription AS s
                        WHERE s.reader = p.reader AND outbox.brings(s, m.topic, m.seq, m.xid, v_before))
    ), added AS (
        INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, cause, key, reader)
        SELECT f.created_at, greatest(clock_timestamp(), f.available_at), f.seq, f.id, f.lane, f.cause, f.key, f.reader
          FROM found AS f
         ORDER BY f.seq
    )
    INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, deferred, lane, reader, snapshot)
    SELECT p.starts_at, p.ends_at, p.number, (p.last).up_to, f.messages, f.messages, p.lane, p.reader, '1:1:'
      FROM last AS p
     CROSS JOIN LATERAL (SELECT count(*) AS messages FROM found AS f
                          WHERE f.reader = p.reader AND f.lane = p.lane AND f.starts_at = p.starts_at) AS f;
    INSERT INTO outbox.base AS b (cluster, seq) VALUES (v_cluster, v_last)
        ON CONFLICT (cluster) DO UPDATE SET seq = excluded.seq, at = now();
END
$rebase$;
