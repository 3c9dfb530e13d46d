"""Where records and scopes go: a file on disk, spans, log events, metrics. Knows no torch."""
