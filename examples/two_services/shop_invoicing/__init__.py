"""The service that writes invoices."""
