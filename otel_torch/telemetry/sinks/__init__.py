"""Where batches and scopes become spans, events and metrics."""
