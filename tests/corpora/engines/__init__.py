"""A model in transformers and in vLLM on a CPU, clean and with faults in the engine."""
