"""The other side of the device: client, transports, API, command line, conformance, fuzzing, benchmarks."""
