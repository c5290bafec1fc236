"""Recorded traffic: one reader a file. No torch."""
