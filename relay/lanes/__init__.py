"""What a relay knows about the lanes that it leases."""
