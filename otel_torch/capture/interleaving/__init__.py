"""Bodies of code that take turns with a model's forward."""
