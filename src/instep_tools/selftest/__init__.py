"""``instep selftest``: whether the numbers are the plain loop's on this machine, and what instep gives here."""
