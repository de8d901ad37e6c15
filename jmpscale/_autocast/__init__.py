"""Runs the matmuls and convolutions of a float32 function in half precision: `autocast`."""
