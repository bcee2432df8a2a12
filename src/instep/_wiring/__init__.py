"""How an attachment is put together: its parts, and what torch calls."""
