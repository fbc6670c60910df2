-- Does:  Identify the outbox of the session's database on a running server.
-- Takes: nothing
-- Gives: one row: identity
-- Index: none
SELECT format('%s/%s', outbox.cluster(),
              -- A copy of the server's files has the same cluster.
              extract(epoch FROM pg_postmaster_start_time()))
