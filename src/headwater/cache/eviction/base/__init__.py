"""Shared parts of eviction policies: interface, lazy heaps of nodes, rows of numbers, worth, and common orders."""
