-- Owner part, repeated at the end of every migration: who may do what. What an earlier version
-- granted is revoked first, in the same transaction.

SET LOCAL ROLE {owner};
{revoke_all};
REVOKE ALL
    ON FUNCTION inbox.unsettled_deliveries(regclass, timestamptz, timestamptz, integer)
    FROM PUBLIC;
GRANT USAGE ON SCHEMA inbox TO {consumer}, {relay}, {maintainer}, {monitor};
GRANT EXECUTE ON FUNCTION inbox.moment_of(uuid) TO {consumer}, {web};
GRANT SELECT, INSERT ON inbox.receipt, inbox.foreign_receipt TO {consumer};
GRANT SELECT, INSERT, DELETE ON inbox.subscription TO {consumer};
GRANT SELECT ON inbox.delivery TO {consumer};
-- A delivery is settled by inserting marks: nobody may update these tables.
GRANT SELECT,
      INSERT (created_at, first_seq, last_seq, lane, consumer, seqs, moments)
    ON inbox.ack
    TO {consumer};
GRANT SELECT,
      INSERT (created_at, due_at, seq, attempts, lane, cause, consumer, key)
    ON inbox.redelivery
    TO {consumer};
GRANT SELECT,
      INSERT (created_at, above, up_to, deliveries, lane, consumer)
    ON inbox.watermark
    TO {consumer};
-- Which numbers were drawn when.
GRANT SELECT ON SEQUENCE inbox.delivery_seq TO {consumer}, {monitor};
GRANT SELECT, USAGE ON SEQUENCE inbox.redelivery_entry_seq TO {consumer};
-- A dead letter is evidence: only the owner may change its payload or its creation time.
GRANT SELECT,
      INSERT (origin, message_id, topic, key, tenant, attempts, schema_version, content_type,
              headers, payload, error_reason, error_stacktrace, retry_after),
      UPDATE (status, retry_count, retry_after, updated_at, error_reason, error_stacktrace,
              discard_reason, discarded_by)
    ON inbox.dead_letter
    TO {consumer};
GRANT SELECT ON inbox.readable_dead_letter TO {consumer};
GRANT SELECT ON inbox.subscription TO {relay}, {monitor};
-- For the postgres publisher.
GRANT USAGE ON SEQUENCE inbox.delivery_seq TO {relay};
-- RETURNING needs SELECT on the columns that it returns.
GRANT INSERT (message_id, lane, schema_version, consumer, topic, key, tenant, content_type,
              headers, payload),
      SELECT (message_id, created_at, seq)
    ON inbox.delivery
    TO {relay};
GRANT SELECT (seq, created_at, message_id, lane, consumer, topic, key, tenant)
    ON inbox.delivery
    TO {monitor};
GRANT SELECT ON inbox.ack, inbox.redelivery, inbox.watermark TO {monitor};
GRANT SELECT
    ON TABLE
        inbox.delivery_status,
        inbox.waiting_delivery,
        inbox.unsettled_delivery
    TO {consumer}, {monitor};
GRANT SELECT ON inbox.receipt, inbox.foreign_receipt TO {monitor};
GRANT SELECT (id, created_at, updated_at, status, retry_count, retry_after, origin,
              message_id, topic, key, tenant, attempts, schema_version, content_type,
              error_reason, discard_reason, discarded_by)
    ON inbox.dead_letter
    TO {monitor};
GRANT SELECT ON inbox.dead_letter_status TO {monitor};
GRANT UPDATE (status, updated_at, discard_reason, discarded_by) ON inbox.dead_letter TO {web};
-- A discard records a receipt.
GRANT INSERT ON inbox.receipt TO {web};

RESET ROLE;
