"""``instep demo``: a small language model trained with instep and without, on the same text, and compared bitwise."""
