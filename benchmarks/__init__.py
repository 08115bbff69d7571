"""Measurements. Each command checks its result before it times it, and prints hardware, versions and spread."""
