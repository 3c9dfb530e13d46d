"""Scores `otel-torch bisect` between two versions on changes that are known."""
