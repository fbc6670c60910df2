-- Owner part: drops the record of what people had the page do.

SET LOCAL ROLE {owner};
DROP TABLE outbox.operation;
RESET ROLE;
