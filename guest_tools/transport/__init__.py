"""How request frames reach a device and responses come back: in this process, over vhost-user, over PCI."""
