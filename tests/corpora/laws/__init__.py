"""Trainings that break one law each, and healthy ones that break none: what `otel-torch show` says of
a recorded training is checked against them. The programs are written as people write trainings, and
none was changed to suit what the product prints.
"""
