"""Cosines between clients' updates and the movement of the model: a run that is watched.

May import: middleware, simulator, simulator.arithmetic.
"""
