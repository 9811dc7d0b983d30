"""Federated algorithms, a file an algorithm; ``registry`` names them.

May import: simulator.author.
"""
