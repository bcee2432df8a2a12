"""The user's optimizer, stepped in parts."""
