"""Files of run folders, which may come from elsewhere: read within limits, written whole and through no link, told by digests.

May import: simulator, simulator.arithmetic.
"""
