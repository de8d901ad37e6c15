"""Runs a program by another rule for its operations, such as all of them in float32, without changing its structure."""
