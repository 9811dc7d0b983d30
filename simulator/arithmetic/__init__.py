"""Trees and their algebra, hashed randomness, optimisers, factored leaves, reductions.

May import: nothing else.
"""
