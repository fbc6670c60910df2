"""What a relay knows of the lanes that it leases."""
