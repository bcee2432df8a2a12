"""What stands on instep: the command line, ``verify``, ``record``, and what they need."""
