"""What instep asks of torch that has no public name, and how long objects live: threads, references, copies, the end of
the process."""


# What instep asks of autograd, and of the tensors that a loop sees.


# Who keeps what alive: threads, references, copies, the end of the process.
