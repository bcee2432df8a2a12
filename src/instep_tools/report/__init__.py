"""``instep report``: a recording as values and as a file, its figures, and the page that shows them."""
