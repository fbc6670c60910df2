-- Owner part: drops the inbox with all its data.

SET LOCAL ROLE {owner};
DROP VIEW inbox.readable_dead_letter, inbox.dead_letter_status, inbox.delivery_status, inbox.unsettled_delivery, inbox.waiting_delivery;
DROP FUNCTION inbox.lane_progress();
DROP FUNCTION inbox.unsettled_deliveries(regclass, timestamptz, timestamptz, integer);
DROP TABLE inbox.receipt, inbox.receipt_template, inbox.foreign_receipt, inbox.subscription,
    inbox.delivery, inbox.delivery_template, inbox.ack, inbox.ack_template, inbox.redelivery,
    inbox.redelivery_template, inbox.watermark, inbox.watermark_template, inbox.dead_letter, inbox.dead_letter_template;
DROP SEQUENCE inbox.delivery_seq, inbox.redelivery_entry_seq;
DROP FUNCTION inbox.moment_of(uuid);
RESET ROLE;
