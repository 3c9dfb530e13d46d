"""Measures the tensors of a call and makes records of them."""
