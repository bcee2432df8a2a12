"""``record``: what runs when in a training loop, and what memory it holds."""

from instep_tools.recording.recording import Recording as Recording
