"""Models of availability, a file a model.

May import: simulator, simulator.arithmetic.
"""
