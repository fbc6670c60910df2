-- Owner part: drops the outbox with all its data.

SET LOCAL ROLE {owner};
DROP VIEW outbox.readable_dead_letter, outbox.dead_letter_status, outbox.message_status, outbox.message_envelope,
    outbox.message_life, outbox.unsettled_message, outbox.deferred_message;
DROP FUNCTION outbox.lane_progress();
DROP TABLE outbox.broker, outbox.message, outbox.message_template, outbox.settlement, outbox.settlement_template,
    outbox.deferral, outbox.deferral_template, outbox.watermark, outbox.watermark_template,
    outbox.dead_letter, outbox.dead_letter_template;
DROP SEQUENCE outbox.message_seq, outbox.deferral_entry_seq;
DROP FUNCTION outbox.cluster();
DROP FUNCTION outbox.add(text, text, text, text, jsonb, text, integer, text, timestamptz, uuid);
DROP FUNCTION outbox.add(text, jsonb, text, text, jsonb, text, integer, text, timestamptz, uuid);
DROP FUNCTION outbox.add(text, bytea, text, text, jsonb, text, integer, text, timestamptz, uuid);
DROP FUNCTION outbox.json_of(text, bytea);
DROP FUNCTION outbox.readable_headers(jsonb);
DROP FUNCTION outbox.ring_doorbell(), outbox.uuid7(), outbox.lane_of(text, uuid, text);
RESET ROLE;
