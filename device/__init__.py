"""The virtio-accel device: protocol engine first, I/O last. Knows rings; knows no array library and no runtime."""
