"""Tools for testing training programs: the functions of `jmpscale.testing`."""
