"""A soak: guests with random load, kills and resets against a daemon, for as long as somebody likes.

`runner` starts and kills processes, `guest` is one of them, `programs` knows right answers, `counters` is what they
share, `census` counts what the device holds, `cli` is the command.
"""
