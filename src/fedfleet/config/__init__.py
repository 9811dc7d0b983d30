"""The configuration: what a user may write, how it is read, and all that can be refused before a run.

May import: files, tracking, algorithms, tasks, middleware.*, datasets, simulator.*.
"""
