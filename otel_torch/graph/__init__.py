"""Compare two programs as graphs of the values that they compute. Knows numpy and nothing else."""
