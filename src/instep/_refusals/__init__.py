"""What ``attach`` refuses, before anything is changed. Each message names what was found and what to do."""
