"""Benchmarks of a CUDA device: cases, published jobs, actors that share it, a peer; ``python -m benchmarks.gpu``."""
