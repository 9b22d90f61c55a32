"""A backend in a process of its own, so that the process that holds a front end's socket runs no native code for it.

    daemon         IsolatedBackend (backend.py): the contract over a socket; WRITE, READ and POLL without it
    fork server    processes/fork_server.py: has imported everything heavy and forks on request
      worker       worker.py: the real backend, behind the socket
        sandboxes  a backend may in turn fork processes from a fork server of its own, say to compile

`messages.py` is what crosses between the two, `completion_page.py` what they share, `launcher.py` how workers come to
be. Nothing here knows a runtime, and everything is the standard library.
"""

from virtaccel.device.isolated.launcher import WorkerLauncher, WorkerLimits, open_backend

__all__ = ["WorkerLauncher", "WorkerLimits", "open_backend"]
