"""Holding a device, this one or another, to its promises: conformance suites, fuzzers, soak, benchmarks."""
