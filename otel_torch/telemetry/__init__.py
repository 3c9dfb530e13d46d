"""Exports spans, events and metrics with OpenTelemetry, or writes them to files."""
