"""Recordings of operations: from rows to graphs that can be compared."""
