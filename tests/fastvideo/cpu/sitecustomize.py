"""Put on PYTHONPATH, this reaches every process of a test run, spawned workers included: FastVideo
finds no GPU and runs.
"""

import fastvideo_without_gpu

fastvideo_without_gpu.install()
