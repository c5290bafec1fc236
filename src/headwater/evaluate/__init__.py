"""Quality of a server's answers. No torch."""
