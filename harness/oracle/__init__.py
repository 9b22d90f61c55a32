"""One model of protocol 1.0, for everything that holds a device to it; shares nothing with the device."""
