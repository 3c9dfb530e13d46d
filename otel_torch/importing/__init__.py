"""Tensors that another program dumped become a recording: what `otel-torch import` does.

manifest -> entries (manifest.py) -> calls (calls.py) -> tensors (arrays.py) -> rows (recording.py)
"""
