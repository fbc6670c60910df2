-- Does:  Read the contents of a message.
-- Takes: id, created_at
-- Gives: content_type, headers, payload
-- Index: message_pkey of one partition
SELECT content_type, outbox.readable_headers(headers) AS headers, payload
  FROM outbox.message
 WHERE id = %(id)s
   AND created_at = %(created_at)s
