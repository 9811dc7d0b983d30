"""``python -m fedfleet``."""

from fedfleet.cli import main

main()
