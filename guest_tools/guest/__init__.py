"""What the one-file guest program does besides driving the function: arrays without numpy, models, remote control.

Standard library only: everything in here runs on a bare python3 inside a guest.
"""
