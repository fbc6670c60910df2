-- Does:  Count what waits on either side, and tell how long the oldest that is due has waited.
-- Takes: nothing
-- Gives: side, due, later (scheduled, or refused and to be tried again), waited (null: nothing is due)
-- Index: message_ready_idx and message_waiting_idx, delivery_ready_idx and delivery_waiting_idx
SELECT 'outbox' AS side,
       count(*) FILTER (WHERE available_at IS NULL OR available_at <= now()) AS due,
       count(*) FILTER (WHERE available_at > now()) AS later,
       now() - min(greatest(created_at, available_at))
           FILTER (WHERE available_at IS NULL OR available_at <= now()) AS waited
  FROM outbox.message
 WHERE published_at IS NULL AND dead_lettered_at IS NULL
 UNION ALL
SELECT 'inbox',
       count(*) FILTER (WHERE available_at IS NULL OR available_at <= now()),
       count(*) FILTER (WHERE available_at > now()),
       now() - min(greatest(created_at, available_at))
           FILTER (WHERE available_at IS NULL OR available_at <= now())
  FROM inbox.delivery
 WHERE acked_at IS NULL
