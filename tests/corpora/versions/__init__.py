"""Which change did it: `otel-torch bisect` between two versions, scored on known answers."""
