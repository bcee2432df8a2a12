"""The command ``instep``, and ``python -m instep``."""

import signal


def main() -> None:
    """The console entry. Until a command has begun its work, and once it has done it, a signal ends the process.

    An exception would not do while modules are imported: extensions of torch's and NumPy's swallow one.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, and stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from instep_tools.cli import main as run

    run()


if __name__ == "__main__":  # a rank's process imports this module under another name
    main()
