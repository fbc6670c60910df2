-- Owner part: drops the inbox with all its data.

SET LOCAL ROLE {owner};
DROP VIEW inbox.readable_dead_letter;
DROP TABLE inbox.receipt, inbox.receipt_template, inbox.foreign_receipt, inbox.subscription,
    inbox.delivery, inbox.delivery_template, inbox.dead_letter, inbox.dead_letter_template;
DROP SEQUENCE inbox.delivery_seq;
DROP FUNCTION outbox.replay_caused_by(uuid);
DROP FUNCTION inbox.moment_of(uuid);
RESET ROLE;
