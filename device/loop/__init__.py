"""What the event loop needs of the kernel: event descriptors that never block, guest memory out of descriptors."""
