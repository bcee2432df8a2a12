"""Who keeps what alive: threads, references, copies, the end of the process."""
