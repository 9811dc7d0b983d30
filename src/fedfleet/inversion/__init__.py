"""Gradient inversion: overhear an exchange, compute it anew, and rebuild a client's examples that match it.

May import: assembly, middleware.*, report, tasks, simulator.*.
"""
