"""What instep asks of autograd, and of the tensors that a loop sees."""
