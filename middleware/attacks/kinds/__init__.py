"""What clients that attack do, a file a family; ``registry`` names them.

May import: simulator.author.
"""
