"""Name what a fault is, beside where it is: a missing bias, a weight of another module, a mask."""
