"""A codec that encrypts payloads; needs `pip install cryptography`."""
