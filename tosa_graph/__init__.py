"""TOSA graphs: bounded reader of untrusted files, validation against the standard, writer. No runtime, no device."""
