-- Owner part, repeated at the end of every migration: who may do what. Grants of earlier versions
-- are revoked first, in the same transaction. The doctor reports missing grants.

EXECUTE EACH
SELECT DISTINCT format('REVOKE ALL ON %s FROM {application}, {relay}, {reader}, {operator}, {consumer}, {maintainer}, {monitor}, {web}', p.relation)
  FROM outbox.promise p JOIN pg_class c ON c.oid::regclass::text = p.relation
 WHERE p.fact LIKE 'right of %'
 UNION ALL
-- PUBLIC may run nothing that writes, or that has the owner's rights.
SELECT format('REVOKE ALL ON ROUTINE %s FROM PUBLIC', f.oid::regprocedure) FROM pg_proc f
 WHERE f.pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace) AND f.prorettype <> 'trigger'::regtype
   AND (f.prosecdef OR f.provolatile = 'v' AND f.proparallel = 'u');

GRANT USAGE ON SCHEMA outbox TO {application}, {relay}, {reader}, {operator}, {consumer}, {maintainer}, {monitor};
-- The detacher already has this as a member of the owner. Granted to the role itself, it keeps the
-- role from being dropped while this database needs it.
GRANT USAGE ON SCHEMA outbox TO {detacher};
GRANT USAGE ON SCHEMA inbox TO {consumer}, {relay}, {reader}, {maintainer}, {monitor};

-- The application adds messages.
GRANT USAGE ON SEQUENCE outbox.message_seq TO {application};
GRANT INSERT (id, lane, schema_version, available_at, topic, key, tenant, content_type,
              headers, payload)
    ON outbox.message
    TO {application};
-- A relay of another database looks for ids, to add each message once.
GRANT SELECT (id, created_at) ON outbox.message TO {application};
GRANT EXECUTE
    ON FUNCTION
        outbox.add(text, bytea, text, text, jsonb, text, integer, text, timestamptz, uuid),
        outbox.add(text, jsonb, text, text, jsonb, text, integer, text, timestamptz, uuid),
        outbox.add(text, text, text, text, jsonb, text, integer, text, timestamptz, uuid)
    TO {application};
-- A role that may add may cancel any message, since a message doesn't record who added it.
GRANT EXECUTE ON FUNCTION outbox.cancel(uuid, text) TO {application}, {operator}, {web};
GRANT EXECUTE ON FUNCTION outbox.move(uuid, timestamptz, text) TO {operator}, {web};
GRANT EXECUTE ON FUNCTION outbox.due_cause(uuid, timestamptz, text) TO {relay}, {reader};

-- Relays and consumers refuse an older schema.
GRANT SELECT ON outbox.alembic_version TO {relay}, {reader}, {consumer};

-- The relay settles a message by inserting positions and log entries: nobody may update these tables. The
-- rows of processes are written only by beat(), which keeps each row to the login that inserted it.
GRANT SELECT
    ON outbox.message, outbox.base, outbox.process, outbox.readable_dead_letter,
       outbox.message_status, outbox.deferred_message, outbox.unsettled_message
    TO {relay};
GRANT SELECT ON SEQUENCE outbox.message_seq TO {relay}, {reader}, {monitor};
GRANT SELECT, USAGE ON SEQUENCE outbox.deferral_entry_seq TO {relay}, {reader};
-- Not settled_at: a role that could choose the time could choose the highest number.
GRANT SELECT, INSERT (created_at, ends_at, number, up_to, late_up_to, messages, deferred, lane, reader, snapshot, late_snapshot, next_xid)
    ON outbox.position
    TO {relay}, {reader};
-- Not entry: a role that could choose it could choose the highest number.
GRANT SELECT, INSERT (created_at, due_at, seq, id, run, attempts, lane, cause, reader, outcome, key, reason, requested_by)
    ON outbox.deferral
    TO {relay}, {reader};
GRANT EXECUTE ON FUNCTION outbox.beat(uuid, text, text, text, text, timestamptz, text, integer, integer, boolean, uuid, text, timestamptz, timestamptz, text, jsonb) TO {relay}, {reader};
GRANT SELECT, UPDATE (broker, broker_since) ON outbox.reader TO {relay};
GRANT SELECT ON outbox.subscription TO {relay};
GRANT EXECUTE ON FUNCTION outbox.subscribe(text, text[], text, boolean, boolean, name) TO {relay}, {reader};

-- A consumer that reads the outbox itself: a trigger lets it store only rows of its own readers.
GRANT SELECT
    ON outbox.message, outbox.base, outbox.process, outbox.reader, outbox.subscription,
       outbox.message_status, outbox.deferred_message, outbox.unsettled_message
    TO {reader};
GRANT SELECT,
      INSERT (origin, message_id, topic, key, tenant, attempts, schema_version, priority, content_type,
              headers, payload, error_reason, retry_after)
    ON outbox.dead_letter
    TO {reader};

-- The operator, a member of the relay's role, also says which role may run a reader, and drops readers.
GRANT UPDATE (role) ON outbox.reader TO {operator};
GRANT UPDATE (ended_at) ON outbox.subscription TO {operator};

-- The consumer.
GRANT SELECT ON inbox.process, inbox.readable_dead_letter TO {consumer};
GRANT SELECT, INSERT ON inbox.receipt, inbox.foreign_receipt TO {consumer};
GRANT SELECT, INSERT, UPDATE ON inbox.job TO {consumer};
GRANT SELECT,
      INSERT,
      UPDATE (starts, started_at, is_open, error_reason, error_stacktrace),
      DELETE
    ON inbox.suspect
    TO {consumer};
GRANT EXECUTE ON FUNCTION inbox.beat(uuid, text, text, text, text, timestamptz, text, integer, integer, boolean, uuid, text, timestamptz, timestamptz, text, jsonb) TO {consumer};
GRANT EXECUTE ON FUNCTION outbox.paused_topics(text) TO {consumer};
GRANT EXECUTE ON FUNCTION outbox.pause(text, text, text, text), outbox.resume(text, text, text, text) TO {operator}, {web};
GRANT EXECUTE ON FUNCTION inbox.moment_of(uuid) TO {consumer}, {web};

-- A dead letter is evidence: only the owner may change its payload or its creation time.
GRANT SELECT,
      INSERT (origin, message_id, topic, key, tenant, attempts, schema_version, priority, content_type,
              headers, payload, error_reason, error_stacktrace, retry_after),
      UPDATE (status, retry_count, retry_after, updated_at, error_reason, error_stacktrace,
              discard_reason, discarded_by)
    ON outbox.dead_letter
    TO {relay};
GRANT SELECT,
      INSERT (origin, message_id, topic, key, tenant, attempts, schema_version, priority, content_type,
              headers, payload, error_reason, error_stacktrace, retry_after),
      UPDATE (status, retry_count, retry_after, updated_at, error_reason, error_stacktrace,
              discard_reason, discarded_by)
    ON inbox.dead_letter
    TO {consumer};

-- The upkeep.
GRANT EXECUTE
    ON FUNCTION
        outbox.make_partitions(text),
        outbox.trim_batch(text),
        outbox.finish_detached(text),
        outbox.note_failure(text, text, text, text, text, text),
        outbox.upkeep_step(text, text),
        outbox.end_upkeep(timestamptz, boolean),
        outbox.trim_cron_log(),
        outbox.accept_clock()
    TO {maintainer};
GRANT EXECUTE ON PROCEDURE outbox.maintain(timestamptz) TO {maintainer};
GRANT EXECUTE
    ON FUNCTION
        outbox.upkeep_plan(text),
        outbox.is_followed(text, timestamptz, timestamptz)
    TO {maintainer}, {monitor}, {relay}, {reader}, {consumer};
GRANT EXECUTE ON FUNCTION outbox.make_days() TO {relay}, {reader}, {consumer};
GRANT SELECT ON outbox.partition_policy TO {application};
GRANT SELECT
    ON outbox.partition_policy, outbox.partition_health, outbox.upkeep, outbox.upkeep_failure,
       outbox.retiring_partition
    TO {maintainer}, {monitor}, {relay}, {reader}, {consumer};
GRANT SELECT ON outbox.dropped_partition, outbox.kept_partition TO {maintainer}, {monitor};

-- The monitor reads everything but payloads, stack traces and headers, of which it sees only those that
-- name a message's cause.
GRANT SELECT
    ON outbox.alembic_version, outbox.promise, outbox.reader, outbox.subscription, outbox.process, outbox.base,
       outbox.deferral, outbox.position, outbox.dead_letter_status, outbox.message_envelope, outbox.message_life,
       outbox.message_status, outbox.deferred_message, outbox.unsettled_message,
       outbox.operation, inbox.process, inbox.dead_letter_status, inbox.receipt, inbox.foreign_receipt, inbox.message_life
    TO {monitor};
GRANT SELECT (id, created_at, seq, xid, lane, available_at, schema_version, topic, key, tenant)
    ON outbox.message
    TO {monitor};
GRANT SELECT (id, created_at, updated_at, status, retry_count, retry_after, origin,
              message_id, topic, key, tenant, attempts, schema_version, priority, content_type,
              error_reason, discard_reason, discarded_by)
    ON outbox.dead_letter, inbox.dead_letter
    TO {monitor};
GRANT SELECT (message_id, message_at, consumer, starts, started_at, is_open, error_reason)
    ON inbox.suspect
    TO {monitor};
GRANT SELECT (message_id, message_at, consumer, state, lease, attempts, lease_until,
              queued_at, started_at, cancel_requested_at, finished_at, topic, key, tenant,
              worker, reason)
    ON inbox.job
    TO {monitor};

-- The page may also discard, which records a receipt, and cancel jobs.
GRANT UPDATE (status, updated_at, discard_reason, discarded_by)
    ON outbox.dead_letter, inbox.dead_letter
    TO {web};
GRANT INSERT ON inbox.receipt TO {web};
GRANT INSERT (message_id, message_at, consumer, state, cancel_requested_at, reason),
      UPDATE (state, cancel_requested_at, finished_at, reason, lease_until)
    ON inbox.job
    TO {web};
-- The request and its author can't be changed afterwards.
GRANT INSERT (kind, selection, reason, asked_by, expected),
      UPDATE (state, succeeded, failed, skipped, problem, finished_at, stopped_by)
    ON outbox.operation
    TO {web};

DELETE FROM outbox.promise WHERE fact LIKE 'right of %';
INSERT INTO outbox.promise (relation, fact) SELECT relation, fact FROM outbox.rights();
