"""TOSA graphs: bounded reader of untrusted files, validation against the standard, and a writer. No runtime, no device."""
