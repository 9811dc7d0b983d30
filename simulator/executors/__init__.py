"""Executors, which run blocks in this process (``local``) or on Ray actors (``ray``).

Actors of this machine are reached by pipes and shared memory.

``base`` says what an executor is, ``inner`` and ``timed`` wrap one, ``worker`` is what runs jobs in any; the rest is Ray's.

May import: simulator, simulator.arithmetic, simulator.block.
"""
