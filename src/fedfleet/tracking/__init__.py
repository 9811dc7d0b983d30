"""Who is told how a run goes: callbacks, and the trackers among them, a file a tracker. None of them changes a bit of it.

May import: files, simulator.
"""
