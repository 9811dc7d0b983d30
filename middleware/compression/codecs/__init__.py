"""What becomes of what travels: clients' messages made smaller, a file a family; ``registry`` names them.

May import: simulator.author.
"""
