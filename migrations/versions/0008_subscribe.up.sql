-- Owner part: how a reader gets topics. In databases of earlier checkouts, each topic of a new reader began when it was added.

CREATE OR REPLACE FUNCTION outbox.overlap(a text, b text) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN a = b OR (right(a, 1) = '*' AND starts_with(b, left(a, -1))) OR (right(b, 1) = '*' AND starts_with(a, left(b, -1)));
COMMENT ON FUNCTION outbox.overlap IS 'whether a message can belong to both of two topics, or prefixes followed by *';

-- A claim skips messages of topics that it can't see. So a topic is added in one transaction, and begins in the
-- next: no claim has skipped messages that commit from then on.
CREATE OR REPLACE FUNCTION outbox.subscribe(reader text, topics text[], broker text, discard boolean DEFAULT false, from_oldest boolean DEFAULT false,
                                 role name DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER {pinned}
SET enable_seqscan = off  -- stale statistics can make a sequential scan look cheap
SET jit = off
AS $body$
DECLARE
    v_known outbox.reader;
    v_is_open boolean;
    v_discards boolean;
    v_since pg_snapshot;
    v_since_seq bigint;
    v_added text[];
    v_oldest text[];
    v_problem text;
    -- A role that may not run all readers adds one for itself.
    v_role name := CASE WHEN NOT pg_has_role(session_user, {relay_name}, 'USAGE') THEN session_user END;
BEGIN
    LOCK TABLE outbox.subscription IN SHARE ROW EXCLUSIVE MODE;
    -- The sessions of relays commit without waiting for the disk.
    PERFORM set_config('synchronous_commit', 'on', true);
    v_since := pg_current_snapshot();
    v_since_seq := coalesce(pg_sequence_last_value('outbox.message_seq'::regclass), -1);
    SELECT r.* INTO v_known FROM outbox.reader AS r WHERE r.reader = subscribe.reader;
    SELECT count(*) > 0, bool_or(s.is_discarded) INTO v_is_open, v_discards
      FROM outbox.subscription AS s WHERE s.reader = subscribe.reader AND s.ended_at IS NULL;
    IF v_known.reader IS NOT NULL AND outbox.refusal(v_known.reader, session_user) IS NOT NULL THEN
        RAISE EXCEPTION '%', outbox.refusal(v_known.reader, session_user) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    v_problem := CASE
        WHEN discard AND v_role IS NOT NULL THEN format('only members of %I discard messages', {relay_name})
        WHEN subscribe.reader = 'main' AND broker = 'direct' THEN 'belongs to relays; give the consumer another name'
        WHEN subscribe.reader = 'main' AND v_known.reader IS NULL AND v_role IS NOT NULL
        THEN format('gets everything; only members of %I add it', {relay_name})
        WHEN NOT v_is_open THEN
            CASE WHEN broker IS NULL AND NOT discard THEN 'no such reader; pass --broker to add it, or --consumer if a consumer reads it'
                 WHEN v_known.reader IS NOT NULL AND from_oldest AND NOT discard
                 THEN 'was dropped, and can return only for new messages; omit --from-oldest, or choose another name' END
        WHEN topics IS NULL THEN 'exists; give --topic to add topics'
        WHEN subscribe.role IS NOT NULL THEN 'exists; omit --role, or change it in outbox.reader'
        WHEN discard AND NOT v_discards THEN 'exists, and gets its messages; omit --discard, or choose another name'
        WHEN v_discards AND NOT discard THEN 'exists, and discards its messages; give --discard, or choose another name'
        WHEN from_oldest AND NOT discard THEN 'exists, and gets other topics only from now on; omit --from-oldest, or choose another name'
        WHEN broker <> v_known.broker
        THEN format('exists, and its messages go to %s, not to %s; omit --broker, or choose another name', v_known.broker, broker) END;
    IF v_problem IS NOT NULL THEN
        RAISE EXCEPTION 'reader=%: %', subscribe.reader, v_problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF NOT v_is_open THEN
        INSERT INTO outbox.reader AS r (reader, broker, broker_since, role)
        VALUES (subscribe.reader, subscribe.broker, CASE WHEN subscribe.broker IS NOT NULL THEN now() END,
                coalesce(v_role, subscribe.role))
            ON CONFLICT ON CONSTRAINT reader_pkey DO UPDATE
           SET broker = excluded.broker, broker_since = excluded.broker_since, role = coalesce(excluded.role, r.role);
    END IF;
    v_added := ARRAY(SELECT DISTINCT t.topic FROM unnest(coalesce(topics, '{*}')) AS t (topic)
                      WHERE NOT EXISTS (SELECT FROM outbox.subscription AS s
                                         WHERE s.reader = subscribe.reader AND s.ended_at IS NULL
                                           AND (s.topic = t.topic OR right(s.topic, 1) = '*' AND starts_with(t.topic, left(s.topic, -1)))));
    v_oldest := ARRAY(SELECT a.topic FROM unnest(v_added) AS a (topic)
                       WHERE coalesce(from_oldest, NOT EXISTS (SELECT FROM outbox.subscription AS s WHERE outbox.overlap(s.topic, a.topic))));
    -- Positions with the next number of each lane: no process settles what it has had in flight since before, when
    -- it didn't read these topics.
    IF v_is_open AND v_oldest <> '{}' AND NOT discard THEN
        LOCK TABLE outbox.position IN SHARE ROW EXCLUSIVE MODE;
        INSERT INTO outbox.position (created_at, ends_at, number, up_to, late_up_to, messages, lane, reader, snapshot, late_snapshot, next_xid)
        SELECT p.starts_at, p.ends_at, max((p.last).number) OVER (PARTITION BY p.lane) + 1, (p.last).up_to, (p.last).late_up_to, 0,
               p.lane, p.reader, (p.last).snapshot, (p.last).late_snapshot, (p.last).next_xid
          FROM outbox.last_positions(everywhere => true) AS p
         WHERE p.reader = subscribe.reader;
    ELSIF NOT v_is_open AND v_known.reader IS NOT NULL THEN
        INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane, reader, snapshot)
        SELECT d.starts_at, d.ends_at, coalesce(max(p.number) OVER (PARTITION BY l.lane), 0) + 1, greatest(p.up_to, v_since_seq), 0, l.lane,
               subscribe.reader, v_since
          FROM outbox.partitions('outbox.message') AS d
         CROSS JOIN generate_series(0, 47) AS l (lane)
          LEFT JOIN LATERAL (SELECT q.number, q.up_to FROM outbox.position AS q
                              WHERE q.reader = subscribe.reader AND q.lane = l.lane AND q.created_at = d.starts_at
                              ORDER BY q.number DESC LIMIT 1) AS p ON true
         WHERE NOT d.detach_pending AND NOT d.is_default
            ON CONFLICT DO NOTHING;
        -- No process can add to these any more.
        INSERT INTO outbox.deferral (reader, id, created_at, lane, seq, run, attempts, cause, outcome, key, reason)
        SELECT e.reader, e.id, e.created_at, e.lane, e.seq, e.run, e.attempts, 'settled', 'discarded', e.key, 'the reader was dropped'
          FROM (SELECT DISTINCT ON (w.id, w.created_at) w.* FROM outbox.deferral AS w
                 WHERE w.reader = subscribe.reader ORDER BY w.id, w.created_at, w.run DESC, w.cause = 'settled' DESC, w.entry DESC) AS e
         WHERE e.cause <> 'settled'
            ON CONFLICT DO NOTHING;
    END IF;
    UPDATE outbox.subscription AS s SET has_begun = true, since = v_since, since_seq = v_since_seq
     WHERE s.reader = subscribe.reader AND s.ended_at IS NULL AND NOT s.has_begun;
    INSERT INTO outbox.subscription (reader, topic, is_discarded, has_begun, since, since_seq)
    SELECT subscribe.reader, a.topic, discard, a.is_oldest OR v_known.reader IS NULL,
           CASE WHEN a.is_oldest THEN '1:1:' ELSE v_since END, CASE WHEN a.is_oldest THEN -1 ELSE v_since_seq END
      FROM (SELECT u.topic, u.topic = ANY (v_oldest) AS is_oldest FROM unnest(v_added) AS u (topic)) AS a;
    IF v_known.reader IS NOT NULL AND v_oldest <> '{}' THEN
        -- Its positions cover these messages, and no claim has read them.
        INSERT INTO outbox.deferral (created_at, due_at, seq, id, lane, cause, key, reader)
        SELECT DISTINCT ON (m.seq, m.id) m.created_at, greatest(clock_timestamp(), m.available_at), m.seq, m.id, m.lane,
               CASE WHEN m.available_at > m.created_at THEN 'scheduled' ELSE 'found' END, m.key, p.reader
          FROM unnest(v_oldest) AS t (topic)
          JOIN outbox.message AS m
            ON m.topic COLLATE "C" BETWEEN rtrim(t.topic, '*') AND CASE WHEN right(t.topic, 1) = '*' THEN left(t.topic, -1) || chr(1114111) ELSE t.topic END
          JOIN outbox.last_positions(everywhere => true) AS p
            ON p.reader = subscribe.reader AND p.lane = m.lane AND m.created_at >= p.starts_at AND m.created_at < p.ends_at
         WHERE outbox.covers(p.last, m.seq, m.xid, (SELECT max(b.seq) FROM outbox.base AS b))
         ORDER BY m.seq, m.id;
    END IF;
    RETURN v_added <> '{}';
END
$body$;
COMMENT ON FUNCTION outbox.subscribe IS
    'let a reader get topics from now on, or from the oldest message on (null: those topics that no reader has ever had), and add it if there is none; returns whether topics were added: then call it again in another transaction, with topics ''{}'', and they begin';
