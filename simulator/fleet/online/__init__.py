"""Models of availability, a file a model; what one is, and the two simplest, are in ``fleet/availability.py``.

May import: simulator, simulator.arithmetic, simulator.fleet.availability.
"""
