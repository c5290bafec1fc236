"""Endpoints, installed on the app by one function a file."""
