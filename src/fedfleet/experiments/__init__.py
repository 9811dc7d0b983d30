"""One experiment and several: run folders, tables, checkpoints, resuming.

May import: config, files, report, tracking, algorithms, tasks, middleware.*, datasets, simulator.*.
"""
