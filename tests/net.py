"""The one bound that tests put on time.

A test waits for an event, or counts. This ends one whose event never comes: it is many times what a test takes on a
busy machine, and less than pytest's own limit, which does not say what was waited for.
"""

SECONDS = 600.0
