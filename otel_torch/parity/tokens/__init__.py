"""Compares programs that batch their tokens differently: rows are tokens."""
