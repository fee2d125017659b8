"""From a model's name to what it is, and to the files that a backend loads."""
