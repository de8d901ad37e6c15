"""A step as a program, with its gradients, its state and its operations."""
