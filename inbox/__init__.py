"""The consuming side of pillarbox: a handler's effects happen exactly once."""
