"""A stand-in for vLLM, which needs its own torch: the calls of one engine step."""
