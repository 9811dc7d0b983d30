"""Where blocks run: in this process, or on Ray actors, of this machine by pipes and shared memory.

May import: simulator, simulator.arithmetic, simulator.block.
"""
