"""``python -m instep``: the command ``instep``."""

from instep_tools.__main__ import main

if __name__ == "__main__":  # a rank's process imports this module under another name
    main()
