"""The fleet: who is online, how fast, whom the server invites and waits for, and virtual time.

May import: simulator, simulator.arithmetic.
"""
