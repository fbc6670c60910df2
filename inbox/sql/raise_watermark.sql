-- Does:  Record that a stretch of a lane in one partition was verified, unless another process has recorded it.
-- Takes: consumer, lane, starts_at (of the partition), above, up_to, deliveries
-- Gives: nothing
-- Index: watermark_pkey of that partition
INSERT INTO inbox.watermark (consumer, lane, created_at, above, up_to, deliveries)
VALUES (%(consumer)s, %(lane)s, %(starts_at)s, %(above)s, %(up_to)s, %(deliveries)s)
    ON CONFLICT DO NOTHING
