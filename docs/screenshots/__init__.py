"""Screenshots of the web page, made from a database seeded for them."""
