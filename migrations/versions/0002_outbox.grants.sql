-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
REVOKE ALL
    ON FUNCTION
        outbox.add(text, bytea, text, text, jsonb, text, integer, text, timestamptz, uuid),
        outbox.add(text, jsonb, text, text, jsonb, text, integer, text, timestamptz, uuid),
        outbox.add(text, text, text, text, jsonb, text, integer, text, timestamptz, uuid)
    FROM PUBLIC;
GRANT USAGE ON SCHEMA outbox TO {application}, {relay}, {consumer}, {maintainer};
GRANT USAGE ON SEQUENCE outbox.message_seq TO {application};
GRANT INSERT (id, lane, schema_version, available_at, topic, key, tenant, content_type,
              headers, payload)
    ON outbox.message
    TO {application};
GRANT EXECUTE
    ON FUNCTION
        outbox.add(text, bytea, text, text, jsonb, text, integer, text, timestamptz, uuid),
        outbox.add(text, jsonb, text, text, jsonb, text, integer, text, timestamptz, uuid),
        outbox.add(text, text, text, text, jsonb, text, integer, text, timestamptz, uuid)
    TO {application};
GRANT SELECT ON outbox.message TO {relay};
-- A message is settled by inserting marks and log entries: nobody may update these tables.
GRANT SELECT, INSERT ON outbox.settlement, outbox.deferral, outbox.watermark TO {relay};
GRANT SELECT ON SEQUENCE outbox.message_seq TO {relay}, {monitor};
GRANT SELECT, USAGE ON SEQUENCE outbox.deferral_entry_seq TO {relay};
GRANT SELECT
    ON TABLE
        outbox.message_status,
        outbox.deferred_message,
        outbox.unsettled_message
    TO {relay}, {monitor};
GRANT SELECT, INSERT (identity), UPDATE (identity, since) ON outbox.broker TO {relay};
GRANT SELECT ON outbox.broker TO {monitor};
-- A dead letter is evidence: only the owner may change its payload or its creation time.
GRANT SELECT,
      INSERT (origin, message_id, topic, key, tenant, attempts, schema_version, content_type,
              headers, payload, error_reason, error_stacktrace, retry_after),
      UPDATE (status, retry_count, retry_after, updated_at, error_reason, error_stacktrace,
              discard_reason, discarded_by)
    ON outbox.dead_letter
    TO {relay};
GRANT SELECT ON outbox.readable_dead_letter TO {relay};
GRANT SELECT (id, created_at, seq, lane, available_at, schema_version, topic, key, tenant)
    ON outbox.message
    TO {monitor};
GRANT SELECT ON outbox.settlement, outbox.deferral, outbox.watermark TO {monitor};
GRANT SELECT (id, created_at, updated_at, status, retry_count, retry_after, origin,
              message_id, topic, key, tenant, attempts, schema_version, content_type,
              error_reason, discard_reason, discarded_by)
    ON outbox.dead_letter
    TO {monitor};
-- Without payloads; of the headers only those that say what led to a message.
GRANT SELECT
    ON TABLE
        outbox.dead_letter_status,
        outbox.message_envelope,
        outbox.message_life
    TO {monitor};
GRANT UPDATE (status, updated_at, discard_reason, discarded_by) ON outbox.dead_letter TO {web};

RESET ROLE;
