"""Writes what was found."""
