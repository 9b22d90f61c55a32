"""Models in a guest that has a bare python3: arrays without numpy, programs, remote control.

Standard library only: everything in here runs on a bare python3 inside a guest.
"""
