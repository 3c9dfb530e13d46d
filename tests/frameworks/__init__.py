"""Programs of other training frameworks, run unmodified: `make test-frameworks`."""
