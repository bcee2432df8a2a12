"""What ran when: spans, told by a recorder, and the arithmetic on them."""
