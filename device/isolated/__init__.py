"""A backend in a process of its own, so that the process that holds a front end's socket runs no native code for it.

    daemon     IsolatedBackend (backend.py): the contract over a socket; WRITE, READ and POLL without it
    nursery    nursery.py: has imported everything heavy and forks on request
      worker   serve.py: the real backend, behind the socket
        nursery, sandboxes: a backend may in turn fork processes from a nursery of its own, say to compile

`messages.py` is what crosses between the two, `memory.py` what they share, `confine.py` what a process gives up before
it looks at anything of a guest's. Nothing here knows a runtime, and everything is the standard library.
"""

from virtaccel.device.isolated.launcher import IsolatingOpener, WorkerLimits, open_backend

__all__ = ["IsolatingOpener", "WorkerLimits", "open_backend"]
