"""Callbacks, which are told how a run goes, and trackers, a file a tracker. None of them changes a bit of it.

May import: files, simulator, simulator.arithmetic.
"""
