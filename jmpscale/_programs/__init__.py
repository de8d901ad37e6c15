"""Reads, rewrites and runs jaxprs."""
