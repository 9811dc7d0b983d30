"""One experiment and several: run folders, tables, checkpoints, resuming.

May import: config, report, algorithms, tasks, datasets, simulator.*.
"""
