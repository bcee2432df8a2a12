"""An emulated accelerator, which shows what stream code leaves to chance, and the tests that run on it."""
