-- Does:  Return whether this transaction has inserted a receipt.
-- Takes: nothing
-- Gives: holds_receipt
-- Index: none; only after a setting that marks a transaction was reset
-- An INSERT, even of a duplicate, locks the table until its transaction ends.
SELECT EXISTS (
           SELECT
             FROM pg_locks
            WHERE locktype = 'relation'
              AND pid = pg_backend_pid()
              AND mode = 'RowExclusiveLock'
              AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND relation IN ('inbox.receipt'::regclass, 'inbox.foreign_receipt'::regclass)
       ) AS holds_receipt
