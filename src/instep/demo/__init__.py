"""``instep demo``: a small language model trained twice, plain and with instep, side by side on the same text."""
