"""``instep report``: a recording as values and as a file, its figures, what to change, and the page that shows them."""
