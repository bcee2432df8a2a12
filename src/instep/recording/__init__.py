"""``record``: what runs when in a training loop, and what memory it holds."""

from instep.recording.recording import Recording as Recording
