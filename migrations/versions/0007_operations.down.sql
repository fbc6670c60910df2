-- Owner part: drops the record of the operations that people started on the page.

SET LOCAL ROLE {owner};
DROP FUNCTION outbox.trim_operations();
DROP TABLE outbox.operation;
RESET ROLE;
