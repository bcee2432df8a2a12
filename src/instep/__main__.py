"""``python -m instep``."""

from instep.cli import main

if __name__ == "__main__":  # a rank's process imports this module under another name
    main()
