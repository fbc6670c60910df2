-- Owner part: drops the record of what people had the page do.

SET LOCAL ROLE {owner};
DROP FUNCTION outbox.trim_operations();
DROP TABLE outbox.operation;
RESET ROLE;
