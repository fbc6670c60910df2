"""RabbitMQ, for its publisher and its source."""
