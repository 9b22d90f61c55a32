"""Suites that tell whether a device does what the standards say. Each is a subcommand of `virtaccel conformance`."""
