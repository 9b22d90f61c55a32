"""Runs TOSA programs on OpenVINO in the device's own buffers."""
