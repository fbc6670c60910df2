-- Owner part: drops the limits. Detached partitions keep theirs, which does no harm.

SET LOCAL ROLE {owner};
DROP FUNCTION outbox.schema_differences();
DROP TABLE outbox.index_promise, inbox.foreign_receipt_template, outbox.partition_policy_template;
ALTER TABLE outbox.message
    DROP CONSTRAINT topic_size,
    DROP CONSTRAINT key_size,
    DROP CONSTRAINT tenant_size,
    DROP CONSTRAINT content_type_size,
    DROP CONSTRAINT headers_size,
    DROP CONSTRAINT headers_are_strings,
    DROP CONSTRAINT payload_size,
    DROP CONSTRAINT schema_version_positive;
ALTER TABLE outbox.message_template
    DROP CONSTRAINT topic_size,
    DROP CONSTRAINT key_size,
    DROP CONSTRAINT tenant_size,
    DROP CONSTRAINT content_type_size,
    DROP CONSTRAINT headers_size,
    DROP CONSTRAINT headers_are_strings,
    DROP CONSTRAINT payload_size,
    DROP CONSTRAINT schema_version_positive;
RESET ROLE;
