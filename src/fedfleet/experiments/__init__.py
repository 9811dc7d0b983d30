"""One experiment and several: run folders, tables, checkpoints, resuming.

May import: assembly, config, files, report, tracking, algorithms, tasks, middleware.*, datasets, simulator.*.
"""
