"""What a log shows of an event, and of the text of others."""
