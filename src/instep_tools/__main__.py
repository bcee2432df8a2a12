"""The command ``instep``, and ``python -m instep``."""

from instep_tools.signals import end_at_once


def main() -> None:
    """The console entry. Until a command has begun its work, and once it has done it, a signal ends the process."""
    end_at_once()
    from instep_tools.cli import main as run

    run()


if __name__ == "__main__":  # a rank's process imports this module under another name
    main()
