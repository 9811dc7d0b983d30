"""Who is online, how fast, whom the server invites and waits for, virtual time.

May import: simulator, simulator.arithmetic.
"""
