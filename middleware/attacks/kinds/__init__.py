"""Attacks by clients, a file a family; ``registry`` names them.

May import: simulator.author.
"""
