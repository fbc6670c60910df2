"""Screenshots of the page, made from a database that is seeded for them."""
