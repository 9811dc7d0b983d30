"""``python -m fedfleet``."""

from fedfleet.commands.cli import main

main()
