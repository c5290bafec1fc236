"""Endpoints, each installed on the app by a function."""
