"""Compare one process with a folder of ranks: which part of each tensor a rank holds."""
