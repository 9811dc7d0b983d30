"""A server that sees the sum of a cohort's messages alone: what that needs and breaks, does to numbers, and costs.

May import: middleware, simulator, simulator.arithmetic, simulator.block, simulator.fleet.
"""
