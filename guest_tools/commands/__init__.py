"""Subcommands of `virtaccel`, one module each; cli.py has the table."""
