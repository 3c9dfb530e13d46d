"""Tests with the real Collector, Prometheus, Jaeger, Loki and an S3 server: built from source (`build`), started
from the files of `collector-config/` (`stack`), fed by unmodified programs, and read back
through their APIs (`apis`). Run with `make e2e`.
"""
