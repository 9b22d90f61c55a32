"""The top floor: all commands of `virtaccel` and the guest program. Composes what is below and decides nothing itself."""
