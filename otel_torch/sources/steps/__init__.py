"""When something runs: the clocks of loops, steps, forwards and calls."""
