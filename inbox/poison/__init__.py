"""Messages that may kill the process that handles them."""
