"""Runs a program with other code: what `otel-torch bisect` asks of a child between two versions."""
