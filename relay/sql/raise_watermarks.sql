-- Does:  Record which stretches of lanes were verified, and how many messages they contain.
-- Takes: lanes, starts (of partitions), aboves, up_tos, messages (same length)
-- Gives: nothing
-- Index: watermark_pkey, for conflicts: another relay may have verified the same
INSERT INTO outbox.watermark (lane, created_at, above, up_to, messages)
SELECT lane, starts_at, above, up_to, messages
  FROM unnest(%(lanes)s::smallint[], %(starts)s::timestamptz[], %(aboves)s::bigint[], %(up_tos)s::bigint[], %(messages)s::bigint[])
       AS stretch (lane, starts_at, above, up_to, messages)
    ON CONFLICT DO NOTHING
