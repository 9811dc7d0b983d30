"""The work of one client, many clients as one tensor program, captures, clients at fault.

May import: simulator, simulator.arithmetic.
"""
