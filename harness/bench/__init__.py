"""`virtaccel bench`: what going through the device costs, held against the same work done directly, in one run.

`measure` knows clocks and order, `host` the machine, `report` how figures are shown; a module for each subcommand knows
what is measured. Nothing here is imported unless the command is used.
"""
