"""Fuzzing of a virtio-accel device and of what talks to one: targets, an engine, reproducers (`virtaccel fuzz`)."""
