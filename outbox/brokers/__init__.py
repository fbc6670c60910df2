"""What the publisher and the source of a broker share; one folder per broker."""
