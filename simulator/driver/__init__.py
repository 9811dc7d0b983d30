"""Rounds, answers, records, evaluation, clients' states, the bytes of checkpoints.

May import: simulator, simulator.arithmetic, simulator.block, simulator.fleet, simulator.executors.
"""
