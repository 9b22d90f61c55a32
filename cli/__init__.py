"""The top floor: the commands of `virtaccel` and the guest program. Composes what is below; decides nothing itself."""
