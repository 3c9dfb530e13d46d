"""The environment variables of vLLM, which reads them while it is imported, and of torch.

One thread, because threads of OpenMP do not survive a fork.
"""

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
