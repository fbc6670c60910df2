"""The lanes that a relay leases: whose turn it is, and which messages may go."""
