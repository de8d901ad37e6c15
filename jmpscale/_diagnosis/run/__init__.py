"""Runs a program with other modes, and measures errors."""
