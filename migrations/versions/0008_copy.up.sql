-- Owner part: drop the copy. In earlier checkouts a relay copied messages to inbox.message, where consumers read
-- them; now they read the outbox. Without that table, this does nothing.

DO $copy$
DECLARE
    -- As outbox.schema_facts() names them. Followers come first.
    v_tables text[] := ARRAY['inbox."position"', 'inbox.deferral', 'inbox.message', 'inbox.base', 'inbox.subscription'];
    v_readers text[];
    v_problem text;
    v_remedy text;
    v_object text;
    x record;
BEGIN
    IF to_regclass('inbox.message') IS NULL THEN
        RETURN;
    END IF;
    -- Nothing can be added between the counts and the drops.
    LOCK TABLE inbox.message, inbox.subscription IN ACCESS EXCLUSIVE MODE;
    PERFORM set_config('jit', 'off', true);

    FOR x IN
        WITH day AS (
            SELECT p.partition, p.starts_at, p.ends_at FROM outbox.partitions('inbox.message') AS p
             UNION ALL
            SELECT c.oid::regclass, r.starts_at, r.ends_at
              FROM outbox.retiring_partition AS r JOIN pg_class AS c ON c.oid = to_regclass(r.partition)
             WHERE r.parent_table = 'inbox.message' AND NOT c.relispartition
        )
        SELECT u.consumer, max(u.found) = 10000 AS is_more, count(*) AS messages, min(u.created_at) AS oldest,
               (array_agg(DISTINCT u.topic))[:10] AS topics, count(DISTINCT u.topic) AS all_topics
          FROM (SELECT q.*, count(*) OVER (PARTITION BY d.starts_at) AS found
                  FROM day AS d CROSS JOIN LATERAL inbox.unsettled_messages(d.partition, d.starts_at, d.ends_at, 10000) AS q) AS u
         GROUP BY u.consumer
         ORDER BY u.consumer
    LOOP
        v_problem := concat_ws('; ', v_problem, format('inbox.message has messages that consumer %s has not handled: %s%s of %s%s, the oldest of %s UTC',
            x.consumer, CASE WHEN x.is_more THEN 'at least ' END, x.messages, array_to_string(x.topics, ', '),
            CASE WHEN x.all_topics > 10 THEN ' and others' END, to_char(x.oldest AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')));
        v_remedy := concat_ws('; ', v_remedy, format('run the consumer %s of the version before, with the broker that it had, until it has handled them,'
            ' or discard them: DELETE FROM inbox.subscription WHERE consumer = %1$L', x.consumer));
    END LOOP;

    -- Relays that fill the copy. A database of this name elsewhere has another outbox; this one's copy has never been filled.
    v_readers := ARRAY(
        SELECT DISTINCT r.reader FROM outbox.reader AS r JOIN outbox.subscription AS s USING (reader)
         WHERE s.ended_at IS NULL AND starts_with(r.broker, 'postgresql://')
           AND right(split_part(r.broker, '?', 1), 1 + length(current_database())) = '/' || current_database()
           AND pg_sequence_last_value('inbox.message_seq') IS NOT NULL);
    IF v_readers <> '{}' THEN
        LOCK TABLE outbox.subscription, outbox.message IN SHARE ROW EXCLUSIVE MODE;
    END IF;
    FOR x IN
        SELECT u.reader, max(u.found) = 10000 AS is_more, count(*) AS messages, min(u.created_at) AS oldest,
               (array_agg(DISTINCT u.topic))[:10] AS topics, count(DISTINCT u.topic) AS all_topics
          FROM unnest(v_readers) AS r (reader)
         CROSS JOIN LATERAL (SELECT m.reader, m.topic, m.created_at, count(*) OVER () AS found
                               FROM (SELECT * FROM outbox.unsettled_message AS q WHERE q.reader = r.reader LIMIT 10000) AS m) AS u
         GROUP BY u.reader
         ORDER BY u.reader
    LOOP
        v_problem := concat_ws('; ', v_problem, format('the outbox has messages that reader %s has not copied to inbox.message: %s%s of %s%s, the oldest of %s UTC',
            x.reader, CASE WHEN x.is_more THEN 'at least ' END, x.messages, array_to_string(x.topics, ', '),
            CASE WHEN x.all_topics > 10 THEN ' and others' END, to_char(x.oldest AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI')));
        v_remedy := concat_ws('; ', v_remedy, format('run the relay of reader %1$s of the version before, with the broker that it had, until it has copied them,'
            ' or let consumers get them as readers (pillarbox readers add NAME --consumer --from-oldest) and run pillarbox readers drop %1$s --discard', x.reader));
    END LOOP;
    IF v_problem IS NOT NULL THEN
        RAISE EXCEPTION '%', v_problem USING HINT = 'nothing was changed: ' || v_remedy || '; then run pillarbox migrate again';
    END IF;

    -- A message that is added from now on is unrouted if no other reader gets it.
    UPDATE outbox.subscription SET ended_at = clock_timestamp() WHERE reader = ANY (v_readers) AND ended_at IS NULL;

    -- CASCADE would drop objects of others that depend on these.
    DROP VIEW inbox.message_life, inbox.job_status, inbox.unsettled_delivery, inbox.waiting_delivery, inbox.delivery_status, inbox.covered_delivery;
    DROP FUNCTION inbox.unsettled_messages, inbox.late_deliveries, inbox.last_positions, inbox.positions_of, inbox.covers, inbox.brings;
    FOR v_object IN
        SELECT r.partition FROM outbox.retiring_partition AS r JOIN pg_class AS c ON c.oid = to_regclass(r.partition)
         WHERE r.parent_table IN ('inbox.message', 'inbox.deferral', 'inbox.position') AND NOT c.relispartition
         UNION ALL
        SELECT p.template FROM outbox.partition_policy AS p
         WHERE p.parent_table IN ('inbox.message', 'inbox.deferral', 'inbox.position') AND to_regclass(p.template) IS NOT NULL
    LOOP
        EXECUTE format('DROP TABLE %s', v_object);
    END LOOP;
    DROP TABLE inbox.position, inbox.deferral, inbox.message, inbox.base, inbox.subscription;
    DROP SEQUENCE inbox.message_seq, inbox.deferral_entry_seq;
    DROP INDEX inbox.job_topic_idx;

    FOR v_object IN
        SELECT format('DELETE FROM %s WHERE parent_table IN (''inbox.message'', ''inbox.deferral'', ''inbox.position'')', c.oid::regclass)
          FROM pg_class AS c
         WHERE c.oid IN ('outbox.retiring_partition'::regclass, 'outbox.dropped_partition'::regclass, 'outbox.upkeep_failure'::regclass)
            OR c.relname = 'part_config' AND has_table_privilege(c.oid, 'DELETE')
               AND c.relnamespace = (SELECT e.extnamespace FROM pg_extension AS e WHERE e.extname = 'pg_partman')
    LOOP
        EXECUTE v_object;
    END LOOP;
    DELETE FROM outbox.partition_policy WHERE follows = 'inbox.message';
    DELETE FROM outbox.partition_policy WHERE parent_table = 'inbox.message';
    DELETE FROM outbox.promise
     WHERE relation = ANY (v_tables || ARRAY['inbox.message_template', 'inbox.deferral_template', 'inbox.position_template',
                                             'inbox.message_seq', 'inbox.deferral_entry_seq'])
        OR fact = 'index inbox.job_topic_idx';
EXCEPTION WHEN dependent_objects_still_exist THEN
    GET STACKED DIAGNOSTICS v_problem = PG_EXCEPTION_DETAIL;
    RAISE EXCEPTION 'can''t drop inbox.message and its objects: %', replace(v_problem, chr(10), '; ')
        USING HINT = 'nothing was changed: drop the objects that depend on them';
END
$copy$;
