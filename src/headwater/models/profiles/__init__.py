"""What known models cost, from their published configurations: no weights, no torch."""
