"""Compare two recordings: read, align, judge, report. Imports neither OpenTelemetry nor torch."""
