"""What a CUDA device does: cases, published jobs, actors that share it, a peer; ``python -m benchmarks.gpu``."""
