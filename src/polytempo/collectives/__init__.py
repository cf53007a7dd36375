"""Processes that compute something together, without a server."""
