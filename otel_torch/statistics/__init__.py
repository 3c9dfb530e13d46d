"""Statistics of tensors: measured while they exist (`measure`), read once a step (`read`), named by
a table (`table`).
"""
