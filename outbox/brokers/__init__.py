"""Code shared by the publisher and the source of a broker; one folder per broker."""
