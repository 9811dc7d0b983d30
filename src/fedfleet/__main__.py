"""``fedfleet``, and ``python -m fedfleet``: the command line, within reach of Ctrl-C from its first import to its end."""

import atexit
import os
import signal
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line and end the process, with the status that ``commands.cli`` says."""
    status = 1  # of an error of ours

    def last() -> None:
        """End, after all that others do at exit: where an ``exec`` was torn apart, Python would end as if killed by the signal."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if status == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    atexit.register(last)
    try:
        from fedfleet.simulator.signals import after_imports

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as in the background
            signal.signal(signal.SIGINT, after_imports(signal.default_int_handler))
        from fedfleet.commands.cli import main as command

        command()
    except KeyboardInterrupt:  # during the imports
        status = INTERRUPTED
        print("interrupted", file=sys.stderr)
        sys.exit(status)
    except SystemExit as e:
        status = e.code if isinstance(e.code, int) else int(e.code is not None)
        raise
    finally:  # all is done and said: one that comes now has nothing to stop but what others do at exit
        signal.signal(signal.SIGINT, lambda *_: os._exit(status))


if __name__ == "__main__":
    main()
