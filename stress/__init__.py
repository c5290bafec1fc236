"""Stress tests of the server: long random traffic, hostile bytes, timing attacks. See README.md."""
