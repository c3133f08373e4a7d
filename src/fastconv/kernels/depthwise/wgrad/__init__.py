"""A kernel."""
