"""A search for hyper-parameters: who draws them, which trials go on at a rung, and what has been found so far.

May import: experiments, config, files, report, simulator, simulator.arithmetic.
"""
