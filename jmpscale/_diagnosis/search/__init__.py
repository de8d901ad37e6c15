"""Searches runs for scales, lines and causes."""
