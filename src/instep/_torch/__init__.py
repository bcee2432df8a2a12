"""What instep asks of torch that has no public name, and how long objects live: threads, references, copies, the end of
the process."""
