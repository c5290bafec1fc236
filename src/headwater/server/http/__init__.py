"""HTTP apart from the API: the listening socket, access, errors, events that go out, the orderly end."""
