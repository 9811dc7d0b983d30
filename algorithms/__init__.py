"""Federated algorithms, a file an algorithm, and what several share; ``registry`` names them.

May import: simulator.author.
"""
