"""instep inside training frameworks."""
