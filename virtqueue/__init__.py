"""Split virtqueues and guest memory. Knows nothing of accelerators."""
