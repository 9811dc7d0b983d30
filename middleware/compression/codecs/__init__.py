"""Codecs that make clients' messages smaller, a file a family; ``registry`` names them.

May import: simulator.author.
"""
