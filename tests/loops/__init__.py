"""Loops as public training code writes them: each trains the same with the line as without."""
