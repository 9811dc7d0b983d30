"""Differential privacy of whole clients and of single examples: what it needs and breaks, the noise, and what is spent.

May import: middleware, middleware.compression.codecs.clip, simulator.*, tasks.targets.
"""
