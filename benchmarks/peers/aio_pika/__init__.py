"""aio-pika's own publish, as the publisher of our relay."""
