-- Does:  Return whether this transaction has inserted a receipt, or begun for a job.
-- Takes: nothing
-- Gives: holds_receipt
-- Index: none; only after a setting that marks a transaction was reset
-- Both lock a table until the transaction ends, even if the receipt was a duplicate.
SELECT EXISTS (
           SELECT
             FROM pg_locks
            WHERE locktype = 'relation'
              AND pid = pg_backend_pid()
              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND relation IN ('inbox.receipt'::regclass, 'inbox.foreign_receipt'::regclass)
       ) AS holds_receipt
