"""Models on numpy arrays: open an accelerator, load, call. The only part of the guest's side that imports numpy."""
