"""How far clients' updates point where the model goes: a run that is watched.

May import: middleware, simulator, simulator.arithmetic.
"""
