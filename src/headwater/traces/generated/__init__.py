"""Drawn traffic: a seed draws a mixture of behaviours, then its requests."""
