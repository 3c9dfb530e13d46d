"""`otel-torch show`: a recording as a table, as an HTML page, or as a trace for Perfetto."""
