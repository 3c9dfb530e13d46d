"""Exports spans, span events, log events and metrics with OpenTelemetry, or writes them to files."""
