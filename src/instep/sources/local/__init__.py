"""Gradients that are final where autograd has accumulated them."""
