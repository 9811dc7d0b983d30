"""The engine. Here: what an author writes against, the contracts every room knows.

May import: simulator.arithmetic.
"""
