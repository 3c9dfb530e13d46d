"""Two recordings compared: read, aligned, judged, reported. Needs no OpenTelemetry and no torch."""
