-- Owner part: what a migration may do under the processes of the version before.

ALTER TABLE outbox.message ADD COLUMN sample text, ADD CONSTRAINT sample_size CHECK (octet_length(sample) < 10) NOT VALID;
ALTER TABLE outbox.position ADD COLUMN sample integer NOT NULL DEFAULT 0;
ALTER TABLE outbox.deferral ADD COLUMN sample text;
ALTER TABLE outbox.process ADD COLUMN sample text;
ALTER TABLE outbox.dead_letter ADD COLUMN sample text;
ALTER TABLE inbox.receipt ADD COLUMN sample text;
ALTER TABLE inbox.job ADD COLUMN sample text;
ALTER TABLE inbox.dead_letter ADD COLUMN sample text;
CREATE TABLE outbox.sample (id bigint PRIMARY KEY, note text);
