"""RabbitMQ: code shared by its publisher and its source."""
