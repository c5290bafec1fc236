"""Hostile bytes for the parsers: each module below is one target, with seeds and the errors that may come out."""
