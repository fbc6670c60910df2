"""A message as attributes and headers, for every broker that carries them."""
