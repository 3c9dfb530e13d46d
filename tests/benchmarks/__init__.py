"""What recording costs, beside what others cost: each file measures one thing, `python -m
tests.benchmarks` all of them.
"""
